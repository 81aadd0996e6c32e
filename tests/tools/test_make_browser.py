"""Search for a browser: PATH first, then the environment's own; without npm nothing fails."""

from __future__ import annotations

import base64
import hashlib

import pytest

from tools import make_browser


def test_the_machines_browser_is_preferred(tmp_path, monkeypatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make_browser.find_browser() == program
    assert "FONTCONFIG_FILE" not in make_browser.environment_of(program)


@pytest.mark.parametrize("how", ["link", "script"])
def test_a_snap_does_not_count(tmp_path, monkeypatch, how):
    snap, program = tmp_path / "snap", tmp_path / "chromium-browser"
    snap.write_text("#!/bin/sh\n")
    if how == "link":
        program.symlink_to(snap)
    else:
        program.write_text('#!/bin/sh\nexec /snap/bin/chromium "$@"\n')
    for path in (snap, program):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(make_browser, "FOLDER", tmp_path / "none")
    assert make_browser.find_browser() is None


def test_the_environments_own_browser_finds_its_libraries(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(make_browser, "FOLDER", tmp_path)
    (tmp_path / "chromium").touch()
    make_browser.write_fonts(tmp_path)
    found = make_browser.find_browser()
    assert found == tmp_path / "chromium"
    assert make_browser.environment_of(found)["LD_LIBRARY_PATH"] == str(tmp_path / "lib")


def test_without_npm_it_prints_a_note_and_succeeds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(make_browser, "FOLDER", tmp_path / "browser")
    assert make_browser.main() == 0
    assert "its test is skipped" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


#: Fakes of npm, which installs a package of empty archives, and of node, which unpacks them.
NPM = """#!/bin/sh
set -e
mkdir -p package/bin
for part in al2023.tar swiftshader.tar fonts.tar; do tar -cf package/bin/$part.br --files-from /dev/null; done
printf '#!/bin/sh\nexit {code}\n' > package/bin/chromium.br
tar -czf package.tgz package
rm -r package
"""
NODE = "#!/bin/sh\ncp $3 $4\n"


@pytest.mark.parametrize(("code", "left"), [(0, ["browser"]), (1, [])])
def test_a_browser_that_does_not_run_here_is_not_kept(tmp_path, monkeypatch, capsys, code, left):
    programs, environment = tmp_path / "bin", tmp_path / "venv"
    programs.mkdir()
    environment.mkdir()
    for name, text in (("npm", NPM.format(code=code)), ("node", NODE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(make_browser, "NAMES", ())
    monkeypatch.setattr(make_browser, "FOLDER", environment / "browser")
    monkeypatch.setattr(make_browser, "check", lambda package: None)  # the fake one's sha512 is another
    assert make_browser.main() == 0
    assert ("its test is skipped" in capsys.readouterr().out) == (code != 0)
    assert [path.name for path in environment.iterdir()] == left


def test_a_package_with_another_sha512_is_neither_unpacked_nor_run(tmp_path, monkeypatch, capsys):
    """node, which would unpack it, leaves a trace."""
    programs, environment = tmp_path / "bin", tmp_path / "venv"
    programs.mkdir()
    environment.mkdir()
    for name, text in (("npm", NPM.format(code=0)), ("node", f"#!/bin/sh\ntouch {tmp_path}/unpacked\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(make_browser, "NAMES", ())
    monkeypatch.setattr(make_browser, "FOLDER", environment / "browser")
    assert make_browser.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    start = f"browser: {make_browser.PACKAGE}: expected {make_browser.INTEGRITY}, got sha512-"
    assert line.startswith(start)
    assert line.endswith("; it is neither unpacked nor run")
    assert not (tmp_path / "unpacked").exists()
    assert list(environment.iterdir()) == []


def test_the_published_package_is_recognised(tmp_path, monkeypatch):
    (tmp_path / "package.tgz").write_bytes(b"abc")
    digest = base64.b64encode(hashlib.sha512(b"abc").digest()).decode()
    monkeypatch.setattr(make_browser, "INTEGRITY", f"sha512-{digest}")
    make_browser.check(tmp_path / "package.tgz")
    monkeypatch.setattr(make_browser, "INTEGRITY", f"sha512-{digest[:-4]}AA==")
    with pytest.raises(make_browser.WrongPackageError, match="expected sha512-"):
        make_browser.check(tmp_path / "package.tgz")
