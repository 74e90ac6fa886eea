"""The torch half's compiler, name, cache, lock and messages, without compiling it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pipecomm.errors import NotBuiltError
from pipecomm.torch_half import c10d_build, c10d_compile
from tests import mounts

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "csrc"


def copy_sources(folder: Path) -> Path:
    copied = folder / "csrc"
    for path in CSRC.rglob("*.h"):
        target = copied / path.relative_to(CSRC)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (copied / "torch" / "_c10d.cpp").write_bytes((CSRC / "torch" / "_c10d.cpp").read_bytes())
    return copied


def test_module_name_does_not_depend_on_where_the_sources_are(
    tmp_path: Path, fake_torch: Path
) -> None:
    name = c10d_compile.module_name(CSRC, fake_torch)
    assert name == c10d_compile.module_name(copy_sources(tmp_path), fake_torch)
    assert re.fullmatch(r"_c10d-9\.8\.7\+test-[0-9a-f]{12}\.cpython-3.*\.so", name)


@pytest.mark.parametrize(
    "changed", ["torch/_c10d.cpp", "transport/api/communicator.h", "base/error.h"]
)
def test_module_name_changes_with_every_file_that_is_compiled_in(
    tmp_path: Path, fake_torch: Path, changed: str
) -> None:
    copied = copy_sources(tmp_path)
    before = c10d_compile.module_name(copied, fake_torch)
    with (copied / changed).open("a") as file:
        file.write("// changed\n")
    assert c10d_compile.module_name(copied, fake_torch) != before


def test_module_name_ignores_files_that_are_not_compiled_in(
    tmp_path: Path, fake_torch: Path
) -> None:
    copied = copy_sources(tmp_path)
    before = c10d_compile.module_name(copied, fake_torch)
    (copied / "codec" / "unrelated.h").write_text("// new\n")
    assert c10d_compile.module_name(copied, fake_torch) == before


def test_torch_version_is_that_of_the_running_torch() -> None:
    assert c10d_compile.torch_version(Path(torch.__file__).parent) == torch.__version__


# First use: caches, locks, messages


def test_load_without_a_compiler_names_both_torches_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_torch: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "_c10d-1.2.3-0123456789ab.so").touch()
    torch = ModuleType("torch")
    torch.__file__ = str(fake_torch / "__init__.py")
    monkeypatch.setattr(c10d_build, "_PACKAGE", package)
    monkeypatch.setattr(c10d_build, "_csrc", lambda: CSRC)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.delitem(sys.modules, "pipecomm._c10d", raising=False)
    with pytest.raises(NotBuiltError, match=r"CXX=/bin/false.*9\.8\.7\+test.*for 1\.2\.3\."):
        c10d_build.load(torch)


def test_load_of_a_broken_file_names_file_torch_and_the_way_out(
    tmp_path: Path, fake_torch: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NotBuiltError, match=r"broken\.so.*9\.8\.7\+test.*Remove the file"):
        c10d_build._load_file(broken, fake_torch)


def test_cache_folder_is_private_and_below_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = c10d_build._cache_folder()
    assert folder == tmp_path / "cache" / "pipecomm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("fault", ["writable by others", "a link", "a file"])
def test_cache_folder_that_cannot_be_trusted_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    bad = tmp_path / "cache" / "pipecomm"
    bad.parent.mkdir()
    if fault == "writable by others":
        bad.mkdir()
        bad.chmod(0o777)
    elif fault == "a link":
        (tmp_path / "elsewhere").mkdir()
        bad.symlink_to(tmp_path / "elsewhere")
    else:
        bad.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(bad.parent))
    monkeypatch.setattr(c10d_build.tempfile, "gettempdir", lambda: str(tmp_path))
    assert c10d_build._cache_folder() == tmp_path / f"pipecomm-{os.geteuid()}"


CACHE = "from pipecomm.torch_half import c10d_build; print(c10d_build._cache_folder())"


def find_cache(noexec: list[Path], home: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(home), "TMPDIR": str(temporary)}
    command = [*mounts.on_noexec(*noexec), sys.executable, "-c", CACHE]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.skipif(bool(mounts.why_impossible()), reason=mounts.why_impossible())
def test_cache_folder_on_a_noexec_mount_is_passed_over(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    done = find_cache([home], home, temporary)
    assert done.stdout.strip() == str(temporary / f"pipecomm-{os.geteuid()}"), done.stderr


@pytest.mark.skipif(bool(mounts.why_impossible()), reason=mounts.why_impossible())
def test_cache_folders_that_are_all_on_noexec_mounts_are_named_with_the_way_out(
    tmp_path: Path,
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    error = find_cache([home, temporary], home, temporary).stderr
    assert f"got {home}/pipecomm, {temporary}/pipecomm-{os.geteuid()} and {temporary}" in error
    assert "noexec" in error
    assert "Set XDG_CACHE_HOME to a folder on another mount" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_cache_folder_of_a_user_without_a_home_is_its_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "pipecomm-65534").mkdir(mode=0o755)  # root's, in the other user's place
    code = (
        "import os; from pipecomm.torch_half import c10d_build\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "folder = c10d_build._cache_folder(); print(folder, folder.stat().st_uid)"
    )
    env = {**os.environ, "HOME": "/nonexistent", "TMPDIR": str(tmp_path)}
    env.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder, uid = done.stdout.split()
    assert Path(folder).parent == tmp_path
    assert folder != str(tmp_path / "pipecomm-65534")
    assert uid == "65534"
    assert not Path(folder).exists()


def test_lock_of_a_killed_build_is_free_and_its_leftovers_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_torch: Path
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipecomm.torch_half import c10d_build\n"
        "folder = Path(sys.argv[1])\n"
        "with c10d_build._locked(folder):\n"
        "    (folder / '_building-killed').mkdir(); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert not can_lock(tmp_path)
        holder.send_signal(signal.SIGKILL)
    built: list[Path] = []
    monkeypatch.setattr(c10d_build, "compile_module", lambda *args: built.append(args[-1]))
    with c10d_build._locked(tmp_path):
        c10d_build._build(CSRC, fake_torch, tmp_path / "module.so")
    assert built == [tmp_path / "module.so"]
    assert not (tmp_path / "_building-killed").exists()


def can_lock(folder: Path) -> bool:
    with open(folder / "lock", "w") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_sources_changed_since_the_install_are_refused_and_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_torch: Path
) -> None:
    name = c10d_compile.module_name(CSRC, fake_torch)
    old = re.sub(r"-[0-9a-f]{12}\.", "-0123456789ab.", name)
    (tmp_path / old).touch()
    monkeypatch.setattr(c10d_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(c10d_build, "_csrc", lambda: CSRC)
    monkeypatch.setattr(c10d_build, "compile_module", lambda *_: pytest.fail("built"))
    with pytest.raises(NotBuiltError, match=f"found {re.escape(old)}: the sources changed"):
        c10d_build._find_or_build(fake_torch)


def test_load_if_built_compiles_nothing_and_takes_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = c10d_build.load_if_built(torch)
    assert built is not None
    assert built is c10d_build.load(torch)
    monkeypatch.delitem(sys.modules, "pipecomm._c10d")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c10d_build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(c10d_build, "_csrc", lambda: CSRC)
    monkeypatch.setattr(c10d_build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(c10d_build, "compile_module", lambda *_: pytest.fail("built"))
    assert c10d_build.load_if_built(torch) is None
