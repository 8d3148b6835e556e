"""The OpenAI-compatible server, which is built on AsyncLLM. In: HTTP requests. Out: JSON, or server-sent events.

app.py has the endpoints. All but client.py, which the command line uses, need the extra [server]:
pip install -e ".[server]".
"""
