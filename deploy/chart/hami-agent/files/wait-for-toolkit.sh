until [ -f "$1/toolkit-ready" ]; do
  if [ -x "$1" ]; then
    echo "waiting for the toolkit of GPU Operator"
  else
    echo "no right to look into $1 of the host, which this waits for: chmod o+x $1" >&2
  fi
  sleep 5
done
