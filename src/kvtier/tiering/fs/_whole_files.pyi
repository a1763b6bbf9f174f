from collections.abc import Sequence

def publish(
    files: Sequence[tuple[str, Sequence[memoryview], str | None]], flags: int, mode: int, /
) -> list[int]: ...
def read(
    files: Sequence[tuple[str, Sequence[memoryview]]], flags: int, renew_before_s: float, /
) -> list[tuple[int, int, int, float] | int]: ...
