"""What is compiled of the package. It is optional: without a compiler the same is done in Python."""

import sysconfig

from setuptools import Extension, setup

HAS_STABLE_INTERFACE = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""A free-threaded Python has none yet; there the modules are not made, for their sources ask for it."""


def extension(module: str) -> Extension:
    """Return the module as it is compiled, once for all versions of Python from 3.11 on."""
    return Extension(
        module,
        [f"src/{module.replace('.', '/')}.c"],
        depends=["setup.py"],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
        optional=True,
        py_limited_api=True,
    )


if HAS_STABLE_INTERFACE:
    setup(
        ext_modules=[extension("kvtier.cpu._page_copy"), extension("kvtier.tiering.fs._whole_files")],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
else:
    setup()
