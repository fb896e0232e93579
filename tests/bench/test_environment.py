"""The processor as reports and rows name it."""

from __future__ import annotations

import platform
from pathlib import Path

from kvfold.bench.environment import cpu_name

XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx2 {}\n\n"


def test_a_processor_is_named_with_the_extensions_that_a_virtual_machine_shows(tmp_path: Path) -> None:
    both, one, none = (tmp_path / name for name in ("both", "one", "none"))
    both.write_text(XEON.format("avx512f amx_tile") * 2)
    one.write_text(XEON.format("avx512f"))
    none.write_text(XEON.format(""))
    assert cpu_name(both) == "Intel(R) Xeon(R) Processor, AVX-512, AMX"
    assert cpu_name(one) == "Intel(R) Xeon(R) Processor, AVX-512"
    assert cpu_name(none) == "Intel(R) Xeon(R) Processor"


def test_a_system_that_names_no_processor_is_told_by_its_architecture(tmp_path: Path) -> None:
    arm = tmp_path / "cpuinfo"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_name(arm) == cpu_name(tmp_path / "missing") == (platform.processor() or platform.machine())
