"""A worker with conversations of two turns that notes the token ids of every reply.

With `die` it kills itself after the first reply; others wait until it has a task.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx

URL, NOTES, MODE = os.environ["TUNESMITH_URL"], Path(sys.argv[1]), sys.argv[2]
DEATH = NOTES.with_suffix(".death")


def ask(client, taken, messages):
    body = {"model": taken["model"], "messages": messages, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {taken['api_key']}"}
    reply = client.post(f"{taken['base_url']}/chat/completions", json=body, headers=headers).raise_for_status().json()
    choice = reply["choices"][0]
    messages += [{"role": "assistant", "content": choice["message"]["content"] or ""}]
    return {"prompt_ids": reply["prompt_token_ids"], "sampled_ids": choice["token_ids"]}


def main():
    with httpx.Client(base_url=URL, timeout=None) as client, NOTES.open("a") as notes:
        while MODE != "die" and not DEATH.exists():
            time.sleep(0.05)
        while True:
            try:
                reply = client.get("/tasks/next", params={"worker": MODE})
            except httpx.ConnectError:
                time.sleep(0.2)
                continue
            if reply.status_code == 410:
                return
            if reply.status_code == 204:
                continue
            taken = reply.raise_for_status().json()
            messages = [{"role": "user", "content": taken["task"]["question"]}]
            turns = [ask(client, taken, messages)]
            if MODE == "die":
                DEATH.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            messages += [{"role": "user", "content": "again"}]
            turns += [ask(client, taken, messages)]
            reward = float(sum(turns[1]["sampled_ids"]) % 7)
            path = f"/trajectories/{taken['attempt_id']}/reward"
            client.post(path, json={"reward": reward, "response": ""}).raise_for_status()
            notes.write(json.dumps({"turns": turns, "reward": reward}) + "\n")
            notes.flush()


if __name__ == "__main__":
    main()
