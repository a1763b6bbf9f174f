import numpy as np
import numpy.typing as npt

def move_pages(
    pages: npt.NDArray[np.int8],
    rows: npt.NDArray[np.int8],
    moves: npt.NDArray[np.int64],
    to_rows: bool,
    is_past_cache: bool,
    /,
) -> None: ...
