"""How large a grammar may be. What passes these limits and is still too much ends at the time limit, in its process."""

from bough.core.errors import RequestError

MAX_TEXT_CHARS = 256 * 1024
MAX_DEPTH = 64  # of nested JSON
MAX_POSITIONS = 20_000  # of one regular expression, its repeats written out
MAX_ITEMS = 1_000_000  # of an array: rules are counted, not written out
MAX_CHOICES = 10_000  # of one enum, or of a choice
MAX_FORCED = 1 << 15  # characters without a choice, which a back end lists with every token: some milliseconds
MAX_LOOKS = 25_000  # subschemas looked at while references are followed and combinations written out
LIGHT_POSITIONS = 64  # of what is compiled in a thread: a second at worst
LIGHT_RULES = 4  # of a schema's grammar, that weigh as much as a position
LIGHT_CHARS = 256  # of its text, likewise


def require_size(text: str, field: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(f"{field} has {len(text)} characters; at most {MAX_TEXT_CHARS} are taken.", field=field)


def require_positions(count: int, field: str) -> None:
    if count > MAX_POSITIONS:
        text = f"{field} is too large: with its repeats written out it has {count} parts; {MAX_POSITIONS} are taken."
        raise RequestError(text, field=field)


def require_choices(count: int, field: str) -> None:
    if count > MAX_CHOICES:
        raise RequestError(f"{field} has {count} values; at most {MAX_CHOICES} are taken.", field=field)
