"""A toy trainer and a toy daemon for the harness's own tests. ``--model.factory`` selects exactness or a defect.

exact         verified checkpoints and fenced rows: the same end under all faults
forgets       resumes one step too late
unchecked     accepts any checkpoint, and does not check that its rows exist
unfenced      writes without owning the store
babbles       ends with a traceback when the store is gone
sticks        hangs after an error
"""

TRAINER = '''
import hashlib, json, os, signal, sys
from pathlib import Path
import redis
from bagpipe.util.failpoints import hit

GUARD = """if redis.call("get", KEYS[2]) ~= ARGV[1] then return 0 end
for i = 2, #ARGV, 2 do redis.call("hset", KEYS[1], ARGV[i], ARGV[i + 1]) end return 1"""

class Failed(Exception):
    pass

def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    how = flags["--model.factory"]
    try:
        train(flags, how)
    except (Failed, redis.RedisError, OSError) as error:
        if how == "babbles":
            raise
        if how == "sticks":
            signal.pause()
        sys.stderr.write(f"error: {error}\\n")
        sys.exit(1)

def train(flags, how):
    client = redis.Redis(unix_socket_path=flags["--store.url"].removeprefix("unix://"))
    num_steps = int(flags["--data.limit"]) // int(flags["--data.batch_size"])
    folder, every = Path(flags.get("--checkpoint.dir", "/nowhere")), int(flags.get("--checkpoint.every", 0))
    token = os.urandom(8).hex()
    client.set("owner", token, nx=how == "unfenced")
    step, rows = newest(folder, check=how != "unchecked")
    if how == "forgets" and step:
        step += 1
    client.delete("toy:{0}")
    write(client, token, how, rows or {"0": ""})
    for step in range(step, num_steps):
        hit("after-fetch")
        for slot in range(30):
            found = client.hget("toy:{0}", str(slot % 10))
            if found is None and rows.get(str(slot % 10)) is not None and how != "unchecked":
                raise Failed("a row is lost")
            before = rows.get(str(slot % 10), "") if how not in ("unchecked", "unfenced") else (found or b"").decode()
            after = hashlib.sha256(f"{step} {slot} {before}".encode()).hexdigest()
            rows[str(slot % 10)] = after
            write(client, token, how, {str(slot % 10): after})
        hit("after-write-back")
        if every and (step + 1) % every == 0:
            save(folder, step + 1, rows)
    if client.hlen("toy:{0}") != 10 and how != "unchecked":
        raise Failed("rows are lost")
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    result = dict(dense_digest=digest, embedding_digest=digest, loss=0.5, steps=num_steps, samples=1)
    Path(flags["--result"]).write_text(json.dumps(result))

def write(client, token, how, rows):
    owner = client.get("owner").decode() if how == "unfenced" and client.exists("owner") else token
    pairs = [part for row in rows.items() for part in row]
    if not client.eval(GUARD, 2, "toy:{0}", "owner", owner, *pairs) and how != "unfenced":
        raise Failed("was taken over")

def save(folder, step, rows):
    target = folder / "generation-000000" / f"step-{step:08d}"
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows)
    part = target / "partial"
    part.write_text(json.dumps({"step": step, "rows": text, "sum": hashlib.sha256(text.encode()).hexdigest()}))
    hit("before-manifest")
    part.replace(target / "manifest.json")

def newest(folder, check):
    for path in sorted(folder.glob("generation-*/step-*/manifest.json"), reverse=True):
        try:
            found = json.loads(path.read_text(errors="replace"))
            right = hashlib.sha256(found["rows"].encode()).hexdigest() == found["sum"]
            if right and path.parent.name == f"step-{found['step']:08d}" or not check:
                return found["step"], json.loads(found["rows"])
        except (ValueError, KeyError, TypeError):
            if not check:
                return 0, {}
    return 0, {}
'''

DAEMON = """
import socket, sys

def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(flags["--listen"].removeprefix("unix:"))
        listener.listen()
        while True:
            listener.accept()[0].close()
"""
