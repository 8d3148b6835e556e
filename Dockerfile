# nanoinfer serve on a CPU.
#
#   docker build -t nanoinfer .
#   docker run -p 127.0.0.1:8000:8000 -v nanoinfer-cache:/home/nanoinfer/.cache nanoinfer Qwen/Qwen3-0.6B
#   docker run -p 8000:8000 -e NANOINFER_API_KEY=... ...     # for other machines. Without a key the server warns
#   docker stop --time 40 ...      # longer than --shutdown-timeout, which is 30 s
FROM python:3.13-slim

# The attention kernel is compiled for the processor when a model is loaded.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY nanoinfer nanoinfer
COPY nanoinfer_lab nanoinfer_lab
COPY nanoinfer_course nanoinfer_course
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[server,structured]"

RUN useradd --create-home nanoinfer && mkdir /home/nanoinfer/.cache && chown nanoinfer /home/nanoinfer/.cache
USER nanoinfer
WORKDIR /home/nanoinfer
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["nanoinfer", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["tiny-qwen3"]
