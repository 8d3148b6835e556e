"""The tasks in the order of the course."""

from nanoinfer.errors import InvalidValueError
from nanoinfer.lab.learn import model, sampling, scheduling, text
from nanoinfer.lab.learn.check import Task

_ORDER = (
    "rotary causal_attention pack match_prefix allocate cache_blocks paged_attention next_chunk make_room "
    "continue_running start argmax temperature min_p top_p repetition_penalty draw held_text stop_string "
    "accept_drafts ngram_draft token_mask eight_bits column_slice"
)
_BY_NAME: dict[str, Task] = {task.name: task for part in (model, scheduling, sampling, text) for task in part.TASKS}
TRACK = [_BY_NAME[name] for name in _ORDER.split()]
NAMES = [task.name for task in TRACK]


def find(name: str) -> Task:
    """Return the task with this name. Raises: InvalidValueError."""
    if name not in NAMES:
        raise InvalidValueError(f"there is no task {name!r}; the tasks are {', '.join(NAMES)}")
    return _BY_NAME[name]
