"""The web address is ::1: the sandbox printed http://::1:PORT, which no client takes."""

from tests.cases.box import CaseSandbox, verdict

with CaseSandbox("--agent-flag=--web-address=::1") as sandbox:
    print("printed:", sandbox.web)
    print("readyz:", sandbox.get("/readyz?verbose").splitlines()[-1])
verdict(right="[::1]" in sandbox.web, wrong="an IPv6 address in a URL needs brackets")
