"""The commands as a user types them: what they print, leave and end with."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import sacrebleu
import tiny_run

import transformer
from transformer.checkpoint import Checkpoints, CheckpointSpec
from transformer.data.tokens import ByteTokenizer, Vocabulary


@pytest.fixture
def config(tmp_path):
    """A file with the tiny run's config, options changed."""

    def write(**changed):
        path = tmp_path / "config.py"
        path.write_text(f"def get_config():\n    return {tiny_run.config(**changed)!r}\n")
        return f"--config={path}"

    return write


def last_line(ran) -> dict:
    return json.loads(ran.stdout.splitlines()[-1])


# ----------------------------------------------------------------------------------- train.py


def test_a_finished_run(trained, config):
    """0, at once; the message says where to look."""
    ran = tiny_run.command("train.py", config(), f"--workdir={trained}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"done after 12 steps; see {trained}/result.json\n"


def test_refusals(trained, tmp_path, config):
    """2, all lines of it, and nothing else."""
    (tmp_path / "file").write_text("")
    for argument, place, message in [
        ("--config.model.depth=3", trained, "model.depth: 2 -> 3"),
        ("--config.train.steps=4", tmp_path / "file", "file: cannot be written to (File exists)"),
    ]:
        ran = tiny_run.command("train.py", config(), f"--workdir={place}", argument)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert message in ran.stderr and "Traceback" not in ran.stderr


def test_a_numerical_failure(tmp_path, config):
    """3, and the message names the step."""
    options = {"schedule": "constant(peak=1e30)", "checkpoint__every": 1}
    ran = tiny_run.command("train.py", config(**options), f"--workdir={tmp_path}")
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("non-finite update_norm at step 1 after 0 steps")
    assert json.loads((tmp_path / "result.json").read_text())["params_sha256"] is None
    assert Checkpoints(tmp_path / "checkpoints", CheckpointSpec()).steps() == []


def started(config, workdir, *arguments):
    return subprocess.Popen(
        [sys.executable, tiny_run.ROOT / "train.py", config, f"--workdir={workdir}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=tiny_run.environment(8),
    )


# What has to be there before the signal is sent, for it to come in ...
MOMENTS = {
    "preparation": "data/.lock",
    "compilation": "data/meta.json",
    "training": "metrics.jsonl",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "preparation"), (signal.SIGINT, "compilation"), (signal.SIGTERM, "training")],
)
def test_signals(tmp_path, config, number, moment):
    """75 with a checkpoint of the last step; the same command goes on. A million steps are never
    done, and a second evaluation would take longer than the test."""
    options = {"train__steps": 10**6, "checkpoint__every": 10**6, "eval__every": 10**6}
    process = started(config(**options), tmp_path)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / MOMENTS[moment]).exists() and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert err == f"{number.name}: finishing the step, then saving (again to stop at once)\n"
    done = json.loads((tmp_path / "result.json").read_text())
    assert out.startswith(f"signal after {done['steps']} steps")
    assert Checkpoints(tmp_path / "checkpoints", CheckpointSpec()).steps() == [done["steps"]]
    assert transformer.load(tmp_path).step == done["steps"] >= 1


# ------------------------------------------------------------------------------ what uses a run


def test_eval(trained):
    ran = tiny_run.command("eval.py", f"--workdir={trained}", "--step=best", "--split=train")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = last_line(ran)
    assert (found["step"], found["split"]) == (12, "train") and found["tokens"] > 2000
    ran = tiny_run.command("eval.py", "--workdir=/nowhere")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "/nowhere is no working directory: it has no config.json\n"


def test_score(trained, tmp_path):
    texts = ["green wall", "", "ten bottles"]
    (tmp_path / "in.txt").write_text("\r\n".join(texts))
    output = tmp_path / "out.jsonl"
    ran = tiny_run.command(
        "scripts/score.py",
        *(f"--workdir={trained}", f"--input={tmp_path / 'in.txt'}", f"--output={output}"),
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for a, b in zip(found, transformer.load(trained).score(texts), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_generate(trained, tmp_path):
    (tmp_path / "in.txt").write_text("green\\nwall\nten\n")
    output = tmp_path / "out.jsonl"
    ran = tiny_run.command(
        "scripts/generate.py",
        *(f"--workdir={trained}", f"--input={tmp_path / 'in.txt'}", f"--output={output}"),
        *("--max_new_tokens=5", "--temperature=0"),
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    prompts = ["green\nwall", "ten"]
    expected = transformer.load(trained).generate(prompts, max_new_tokens=5, temperature=0)
    assert found == [{"prompt": p, "text": t} for p, t in zip(prompts, expected, strict=True)]
    ran = tiny_run.command("scripts/generate.py", f"--workdir={trained}", "--prompt=ten")
    assert ran.returncode == 0 and ran.stdout.startswith("ten")


# ------------------------------------------------------------------------- of pairs and of labels


@pytest.fixture(scope="module")
def octets(tmp_path_factory):
    """A run of pairs that can be given any text."""
    folder = tmp_path_factory.mktemp("octets") / "w"
    return tiny_run.untrained(folder, Vocabulary(ByteTokenizer()), **tiny_run.PAIRS)


# A byte-order mark, and all that Python or others take for the end of a line.
LINES = ["ab\u2028cd", "", "\x85 x\x0by\rz \x0c", "one\\ntwo", "\u2029\x1c\x1d\x1e", "end\r"]
FILE = b"\xef\xbb\xbf" + "\r\n".join(LINES[:3]).encode() + b"\n" + "\n".join(LINES[3:]).encode()


def test_translate(octets, tmp_path):
    """One output for each line, whatever stands in it."""
    (tmp_path / "in.txt").write_bytes(FILE)
    output = tmp_path / "out.jsonl"
    ran = tiny_run.command(
        "scripts/generate.py",
        *(f"--workdir={octets}", f"--input={tmp_path / 'in.txt'}", f"--output={output}"),
        *("--max_new_tokens=4", "--beams=3", "--n_best=2", "--length_penalty=1", "--batch_size=2"),
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in output.read_text("utf-8").split("\n")[:-1]]
    prompts = [line.replace("\\n", "\n") for line in LINES]
    assert [record["prompt"] for record in found] == prompts
    run = transformer.load(octets)
    expected = run.generate(prompts, max_new_tokens=4, beams=3, n_best=2, length_penalty=1.0)
    for record, best in zip(found, expected, strict=True):
        assert record["text"] == best[0].text
        assert [h["text"] for h in record["hypotheses"]] == [h.text for h in best]
        for h, written in zip(record["hypotheses"], best, strict=True):
            assert set(h) == {"text", "score", "logprob"}
            assert h["score"] == pytest.approx(written.score, abs=1e-4)
            assert h["logprob"] == pytest.approx(written.logprob, abs=1e-4)


@pytest.mark.slow
def test_translations_are_printed_one_a_line(translated, tmp_path):
    (tmp_path / "in.txt").write_text("abc\n\nf\n")
    arguments = [f"--workdir={translated}", f"--input={tmp_path / 'in.txt'}", "--max_new_tokens=5"]
    ran = tiny_run.command("scripts/generate.py", *arguments, "--temperature=0")
    assert (ran.returncode, ran.stderr) == (0, "")
    run = transformer.load(translated)
    expected = run.generate(["abc", "", "f"], max_new_tokens=5, temperature=0)
    assert ran.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.slow
def test_who_writes_no_text_says_so(labelled):
    """2, and what to use instead."""
    ran = tiny_run.command("scripts/generate.py", f"--workdir={labelled}", "--prompt=1")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "this run (objective=classify, model.family=encoder) gives labels, not texts: use "
        "classify(texts), or eval.py with --config.eval.decode=exact and --output\n"
    )


def test_score_pairs(octets, tmp_path):
    pairs = [(line, line[::-1]) for line in LINES]
    text = "\n".join(map("\t".join, pairs))
    (tmp_path / "in.tsv").write_bytes(text.encode())
    output = tmp_path / "out.jsonl"
    arguments = [f"--workdir={octets}", f"--input={tmp_path / 'in.tsv'}", f"--output={output}"]
    ran = tiny_run.command("scripts/score.py", *arguments)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for a, b in zip(found, transformer.load(octets).score(pairs), strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    (tmp_path / "in.tsv").write_text("a\tb\n\t\na\tb\tc\n")
    ran = tiny_run.command("scripts/score.py", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        f"{tmp_path / 'in.tsv'} line 3: expected source, one tab and target, found 2 tabs\n"
    )


def test_evaluate_translations(translated, tmp_path):
    """The object tells all that belongs to the number; the file holds what it was made of."""
    output = tmp_path / "out.jsonl"
    ran = tiny_run.command(
        "eval.py",
        *(f"--workdir={translated}", "--config.eval.split=test", "--step=best"),
        f"--output={output}",
        *("--config.eval.decode=bleu(beams=2, tokenize='char')", "--config.data.batch_size=5"),
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = last_line(ran)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    written, references = ([r[name] for r in records] for name in ("text", "reference"))
    assert [r["source"][::-1] for r in records] == references
    bleu = sacrebleu.corpus_bleu(written, [references], tokenize="char").score
    assert found["bleu"] == pytest.approx(bleu)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, [references]).score)
    assert (found["direction"], found["sentences"]) == ("source-text", len(records))
    assert "|tok:char|" in found["bleu_signature"] and "|nw:0|" in found["chrf_signature"]
    assert {"step", "split", "loss", "nll", "accuracy", "perplexity", "tokens"} < set(found)
    output.unlink()
    ran = tiny_run.command("eval.py", f"--workdir={translated}", f"--output={output}")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "--output: the run writes nothing; set --config.eval.decode\n"
    assert not output.exists()


def test_inspect(trained, config, tmp_path):
    shutil.copytree(trained / "data", tmp_path / "data")
    ran = tiny_run.command("scripts/inspect.py", config(), f"--workdir={tmp_path}")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "config.model.vocab = 36\n" in ran.stdout
    count = json.loads((trained / "result.json").read_text())["parameters"]
    assert f"total {count:,} parameters" in ran.stdout
    learned = ("--config.model.vocab=36", "--config.model.position=learned")
    ran = tiny_run.command("scripts/inspect.py", config(), f"--workdir={tmp_path}", *learned)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "config.model.max_len = 16\n" in ran.stdout
