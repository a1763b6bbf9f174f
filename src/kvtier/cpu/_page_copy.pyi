from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def move_pages(
    shares: Sequence[tuple[npt.NDArray[np.int8], npt.NDArray[np.int8], npt.NDArray[np.int64], bool]],
    turn: npt.NDArray[np.int64],
    part_bytes: int,
    to_rows: bool,
    /,
) -> None: ...
