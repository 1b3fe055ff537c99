"""`doctor` P-PRELOAD with another hook path: ld.so.preload must name the path that answers mount.

Right: ok for that path, and WRONG for the default one, which would leave containers without limits.
"""

import re

from tests.cases.box import CaseSandbox, verdict

with CaseSandbox() as sandbox:
    hook = sandbox.dir / "hook" / "vgpu"
    rights = {f"{hook}/libvgpu.so": "ok", "/usr/local/vgpu/libvgpu.so": "WRONG"}
    said = {}
    for path, right in rights.items():
        (hook / "ld.so.preload").write_text(f"{path}\n")
        text = sandbox.run(*sandbox.doctor, "--only", "library")
        (said[path],) = re.findall(r"library +(\S+) +P-PRELOAD", text)
        print(f"ld.so.preload names {path}: doctor says {said[path]}, right is {right}")
verdict(right=said == rights, wrong="the path is a constant, not the one that answers mount")
