"""The OpenAI-compatible server, which is built on AsyncLLM. In: HTTP requests. Out: JSON, or server-sent events.

app.py has the endpoints. async_llm.py and engine_thread.py do without the extra [server], which all other files need:
pip install -e ".[server]".
"""
