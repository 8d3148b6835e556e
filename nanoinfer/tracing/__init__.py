"""The events that the engine emits, and the Recorder that keeps them."""

from nanoinfer.tracing.events import (
    BatchBuilt as BatchBuilt,
)
from nanoinfer.tracing.events import (
    BlockCopied as BlockCopied,
)
from nanoinfer.tracing.events import (
    BlockEvicted as BlockEvicted,
)
from nanoinfer.tracing.events import (
    BlocksAllocated as BlocksAllocated,
)
from nanoinfer.tracing.events import (
    BlocksCached as BlocksCached,
)
from nanoinfer.tracing.events import (
    BlocksForked as BlocksForked,
)
from nanoinfer.tracing.events import (
    BlocksFreed as BlocksFreed,
)
from nanoinfer.tracing.events import (
    BlocksShared as BlocksShared,
)
from nanoinfer.tracing.events import (
    Candidate as Candidate,
)
from nanoinfer.tracing.events import (
    EngineStarted as EngineStarted,
)
from nanoinfer.tracing.events import (
    Event as Event,
)
from nanoinfer.tracing.events import (
    EventBuffer as EventBuffer,
)
from nanoinfer.tracing.events import (
    Interval as Interval,
)
from nanoinfer.tracing.events import (
    RequestAdded as RequestAdded,
)
from nanoinfer.tracing.events import (
    RequestFinished as RequestFinished,
)
from nanoinfer.tracing.events import (
    StageApplied as StageApplied,
)
from nanoinfer.tracing.events import (
    StepScheduled as StepScheduled,
)
from nanoinfer.tracing.events import (
    StepTimed as StepTimed,
)
from nanoinfer.tracing.events import (
    TokenAppended as TokenAppended,
)
from nanoinfer.tracing.events import (
    TokenDrawn as TokenDrawn,
)
from nanoinfer.tracing.events import (
    TokensDrafted as TokensDrafted,
)
from nanoinfer.tracing.events import (
    Tracer as Tracer,
)
from nanoinfer.tracing.recorder import Recorder as Recorder
