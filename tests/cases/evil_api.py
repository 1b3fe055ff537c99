"""An API server that always gives a `continue` token: `explain` and `status --node` never ended."""

import http.server
import json
import subprocess
import tempfile
import threading
from pathlib import Path

from tests.cases.box import run_agent, verdict

LIST = {"metadata": {"resourceVersion": "1", "continue": "more"}, "items": []}
POD = {"metadata": {"name": "x", "uid": "x"}, "spec": {"containers": []}, "status": {}}
NODE = {"metadata": {"name": "n1", "uid": "n1"}, "spec": {}, "status": {}}


class Endless(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        last = self.path.partition("?")[0].rpartition("/")[2]
        body = json.dumps({"x": POD, "n1": NODE}.get(last, LIST)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless)
threading.Thread(target=server.serve_forever, daemon=True).start()
config = {
    "clusters": [
        {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
    ],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "c",
}
wrong = []
with tempfile.TemporaryDirectory() as root:
    path = Path(root) / "config"
    path.write_text(json.dumps(config))
    for words in (("explain", "demo/x"), ("status", "--node", "n1")):
        try:
            code, text = run_agent(*words, "--kubeconfig", path, timeout=20)
        except subprocess.TimeoutExpired:
            code, text = -1, "does not end"
        print(*words, "exit", code, text.strip()[-250:])
        wrong += [words[0]] if code != 3 or len(text.splitlines()) != 1 else []
verdict(right=not wrong, wrong=f"{' and '.join(wrong)} not refused in a sentence")
