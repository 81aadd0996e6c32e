"""A toy trainer for the harness's own tests. ``--model.factory`` selects exactness or a defect.

exact         the same end, with or without a cache, killed or not
differs       a cache changes the result
misjudges     a cache changes an evaluation
forgets       resumes one step too late
babbles       a cache ends it with a traceback
sticks        a cache makes it hang
chatters      a line on standard error with a cache, and a good end
refuses       refused always, which is no defect
refuses-cache refused with a cache
"""

TRAINER = """
import hashlib, json, signal, sys
from pathlib import Path
from bagpipe.util.failpoints import hit

def main():
    flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    how, has_cache = flags["model.factory"], flags["cache.rows"] != "0"
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    if how == "refuses" or how == "refuses-cache" and has_cache:
        sys.stderr.write(f"error: {flags['data.path']} is not to our taste\\\\n")
        sys.exit(2)
    if how == "babbles" and has_cache:
        raise RuntimeError("a defect")
    if how == "sticks" and has_cache:
        signal.pause()
    if how == "chatters" and has_cache:
        sys.stderr.write("GOAWAY\\\\n")
    saved = Path(flags.get("checkpoint.dir", "/nowhere"))
    if "checkpoint.start_from" in flags and not saved.exists():
        saved.write_text(json.dumps((0, Path(flags["checkpoint.start_from"]).read_text())))
    state = "cache" if how == "differs" and has_cache else ""
    step, state = json.loads(saved.read_text()) if saved.exists() else (0, state)
    if how == "forgets" and step:
        step += 1
    for step in range(step, int(flags.get("run.steps") or 0) or 12):
        hit("after-fetch")
        state = hashlib.sha256(f"{step} {state}".encode()).hexdigest()
        if "checkpoint.dir" in flags:
            saved.write_text(json.dumps((step + 1, state)))
    names = ("loss", "samples", "auc", "ne", "skipped_rows", "skipped_batches", "loss_scale", "stopped", "evaluations",
        "best_step", "early_stopped")
    result = dict.fromkeys(names, 0) | dict(steps=12, dense_digest=state, embedding_digest=state)
    result["evaluations"] = [how == "misjudges" and has_cache]
    Path(sys.argv[-1]).write_text(json.dumps(result))
""".replace("\\\\n", "\\n")

CAPACITY = """
def main():
    print('{"largest": 7, "total": 20}')
"""
