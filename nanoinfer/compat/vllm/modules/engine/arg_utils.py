from nanoinfer.config import AsyncEngineArgs, EngineArgs
