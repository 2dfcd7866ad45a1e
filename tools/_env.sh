# Makes or refreshes the environment in .venv and leaves its interpreter in $PYTHON. Sourced by the commands beside it.
#
# An installed torch >= 2.11 is used as it is: .venv then sees that interpreter's packages and only adds what is missing.
# Without one, constraints.txt pins the environment that was tested, torch included.
# Set PYTHON to choose the interpreter; otherwise python3, python, python3.13, 3.12, 3.11 are tried, one with torch first.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PATH="${PATH//"$VENV/bin:"/}" # an activated .venv must not become the base of its own successor

fail() {
    echo "error: $*" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the version of the torch of interpreter $1 where it is 2.11 or newer, and fails otherwise.
usable_torch() {
    "$1" -c '
import sys, torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(1)
print(torch.__version__)' 2>/dev/null
}

choose_interpreter() {
    local candidate first=""
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
        new_enough "$candidate" || continue
        first="${first:-$candidate}"
        if TORCH="$(usable_torch "$candidate")"; then
            BASE="$candidate"
            return
        fi
    done
    [ -n "$first" ] || fail "no Python >= 3.11 found (tried ${PYTHON:-python3, python, python3.13, 3.12, 3.11}); set PYTHON=/path/to/python"
    BASE="$first" TORCH=""
}

# A new environment that also sees the packages of $BASE where those are to be used. A path file and not
# --system-site-packages, since that option looks past an active virtual environment.
make_venv() {
    rm -rf "$VENV"
    if "$BASE" -c 'import ensurepip' 2>/dev/null; then
        "$BASE" -m venv "$VENV"
    else
        "$BASE" -m venv --without-pip "$VENV"
        "$BASE" -m pip --quiet --python "$VENV/bin/python" install -c "$ROOT/constraints.txt" pip
    fi
    [ -n "$TORCH" ] || return 0
    "$BASE" - "$VENV" <<'PY'
import pathlib, site, sys
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
lines = [f"import site; site.addsitedir({folder!r})" for folder in folders if pathlib.Path(folder).is_dir()]
target = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
(target / "interpreter_packages.pth").write_text("\n".join(lines) + "\n")
PY
}

install_package() {
    local pip=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install)
    local constraints="$ROOT/constraints.txt"
    if [ -n "$TORCH" ]; then
        constraints="$VENV/constraints.txt"
        echo "torch==$TORCH" >"$constraints"
    fi
    # the build needs nothing but setuptools, so that it also works where the package index cannot be reached
    "${pip[@]}" -c "$constraints" "setuptools>=77" &&
        "${pip[@]}" -c "$constraints" --no-build-isolation -e "$ROOT[dev,plots]" ||
        fail "the packages could not be installed (see pip's message above). Behind a proxy or on a machine without a" \
            "package index, install them into an interpreter yourself and name it: PYTHON=/path/to/python $0"
}

ensure_environment() {
    choose_interpreter
    local stamp
    stamp="$ROOT $("$BASE" -c 'import sys; print(sys.executable, sys.version)') torch=$TORCH $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    if [ "$(cat "$VENV/made_from" 2>/dev/null)" != "$stamp" ]; then
        local torch="${TORCH:+its own torch $TORCH}"
        echo "Making .venv: $("$BASE" --version), ${torch:-torch from constraints.txt}; this takes a minute or more ..." >&2
        make_venv
        install_package
        echo "$stamp" >"$VENV/made_from"
    fi
    PYTHON="$VENV/bin/python"
}
