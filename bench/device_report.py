"""Puts the steps, checks and timings of bench/device_check.sh into one JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    steps = {}
    for line in options.steps.read_text().splitlines():
        name, code, seconds = line.split("\t")
        steps[name] = {"result": "passed" if code == "0" else code, "seconds": int(seconds)}
        log = options.logs / f"{name}.log"
        if log.exists():
            text = log.read_text()
            counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", text[-2000:])
            steps[name] |= {what: int(n) for n, what in counts}
            if code != "0" and "Device not supported" in text:  # compute-sanitizer under some virtual machines
                steps[name]["result"] = "skipped: compute-sanitizer does not support this device"
    report = {"steps": steps}
    for part in ("checks", "timings"):
        path = options.logs / f"{part}.json"
        report[part] = json.loads(path.read_text()) if path.exists() else "this step did not end"
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.out}")
    failed = [name for name, s in steps.items() if s["result"] != "passed" and "skipped" not in str(s["result"])]
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
