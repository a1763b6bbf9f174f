"""The one part of the package that is compiled. It is optional: without a compiler the same is done in Python."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvtier.tiering.fs._whole_files",
            ["src/kvtier/tiering/fs/_whole_files.c"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
