"""What a command line prints, as tests/golden has it."""

import contextlib
import io
import re
import shlex
from collections.abc import Mapping

from agent.cli.main import dispatch

VARIABLE = re.compile(r"[A-Z_]+=")


def ran(line: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a line `[NAME=VALUE ...] hami-agent ...`: exit code, standard output, standard error."""
    words = shlex.split(line)
    given = dict(words.pop(0).split("=", 1) for word in [*words] if VARIABLE.match(word))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dispatch(words[1:], {**(environ or {}), **given})
    said = "".join(f"! {text}\n" for text in err.getvalue().splitlines())
    text = f"exit {code}\n{out.getvalue()}{said}"
    return re.sub(r'(generatedAt"?: ?["\']).*?(["\'])', r"\1TIME\2", text)
