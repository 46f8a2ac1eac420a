"""How much memory a dump needs, and whether the machine has it."""

from pathlib import Path

from ..bits.cgroups import room_in_cgroups

# Bytes for each token, at most, while a report is made: 25 arrays of float64 and those of the file.
# A test measures that no more are used.
BYTES_PER_TOKEN = 200
MOST_TOKENS = 2**28  # where the memory of the machine is not known
GB = 1e9
MEMORY = Path("/proc/meminfo")


def check_memory(text: str, tokens: int) -> None:
    """Raises ValueError if a report on so many tokens needs more memory than there is.

    `text` begins the message: which array has so many tokens.
    """
    most = most_tokens()
    if tokens > most:
        raise ValueError(
            f"{text}: a report on {tokens:,} tokens needs about "
            f"{tokens * BYTES_PER_TOKEN / GB:,.0f} GB of memory, and there is room for {most:,} "
            "tokens: give fewer sequences"
        )


def most_tokens() -> int:
    """The number of tokens for which there is memory."""
    available = available_memory()
    if available is None:
        return MOST_TOKENS
    return min(MOST_TOKENS, available // BYTES_PER_TOKEN)


def available_memory() -> int | None:
    """Bytes that this process may still allocate, as Linux tells them; None elsewhere."""
    try:
        lines = MEMORY.read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return min(available, room_in_cgroups())
