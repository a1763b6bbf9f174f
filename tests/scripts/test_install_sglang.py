"""What of SGLang's wheel is unpacked: its Python, without the file that imports an engine."""

from scripts.install_sglang import CONTRACT, choose


def test_the_contract_is_unpacked_and_what_imports_an_engine_is_not() -> None:
    contract = CONTRACT.replace(".", "/") + ".py"
    names = [
        "sglang/__init__.py",
        contract,
        "sglang/srt/kernels.so",
        "sglang-0.5.23.dist-info/METADATA",
        "../x.py",
    ]
    assert choose(names) == [contract]
