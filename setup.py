"""What is compiled of the package. It is optional: without a compiler the same is done in Python."""

from setuptools import Extension, setup


def extension(module: str) -> Extension:
    """Return the module as it is compiled, once for all versions of Python from 3.11 on."""
    return Extension(
        module,
        [f"src/{module.replace('.', '/')}.c"],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
        optional=True,
        py_limited_api=True,
    )


setup(
    ext_modules=[extension("kvtier.cpu._page_copy"), extension("kvtier.tiering.fs._whole_files")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
