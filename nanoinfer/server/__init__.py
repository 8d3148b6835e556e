"""The OpenAI-compatible server. In: HTTP requests. Out: JSON, or streams of server-sent events. It stands on AsyncLLM.

    app.py            the endpoints, and create_app(async_llm, settings)
    protocol.py       the bodies of requests, and their SamplingParams
    answers.py        one HTTP request's streams, read to the end or as events
    chat_format.py    tools in requests, and what is parsed in answers: reasoning, tool calls
    logprobs.py       log-probabilities in OpenAI's two shapes
    errors.py         every error in OpenAI's shape
    limits.py         keys, header sizes, JSON
    metrics.py        Prometheus
    page.py           the web page at /, page.html, and the replays of answers
    run.py            uvicorn, and shutdown
    client.py         a client of this and of other servers, for the command line

All but the client need the extra [server]: pip install "nanoinfer[server]".
"""
