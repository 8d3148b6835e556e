"""vLLM's modules and names, so that a script for vLLM runs when nanoinfer takes vllm's place in its imports.

modules/ has the modules that nanoinfer lacks. It is the second folder of nanoinfer.__path__, so modules/inputs is found as
nanoinfer.inputs. names.py has the names that nanoinfer and nanoinfer.config lack. Most names are objects of nanoinfer, and
those of placeholders.py say in one sentence what to do instead. neutral.py does so for arguments and methods. docs/vllm.md
lists all of them. But for the server, nanoinfer imports nothing of it until such a name is asked for.
"""
