import time, json, sys
import tiny_run
def test_a(trained, translated, labelled):
    for w in (trained, translated, labelled):
        print((w/"metrics.jsonl").read_text())
        r=json.loads((w/"result.json").read_text()); print(r["validation"], r["seconds"])
