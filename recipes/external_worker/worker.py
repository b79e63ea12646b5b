"""A worker of `tunesmith serve`: takes tasks, asks the model, posts rewards. Start as many as you like."""

import os
import re
import time

import httpx
import openai

URL = os.environ.get("TUNESMITH_URL", "http://127.0.0.1:8765")


def work(taken):
    """Ask the model; the reward is 1 for the right number, less a little for length."""
    task = taken["task"]
    with openai.OpenAI(base_url=taken["base_url"], api_key=taken["api_key"], timeout=taken["deadline_s"]) as client:
        messages = [{"role": "user", "content": task["question"]}]
        completion = client.chat.completions.create(model=taken["model"], messages=messages)
    answer = completion.choices[0].message.content or ""
    is_right = re.findall(r"\d+", answer)[-1:] == [task["answer"]]
    return {"reward": is_right - 0.001 * len(answer), "response": answer, "metrics": {"accuracy": int(is_right)}}


def main():
    with httpx.Client(base_url=URL, timeout=None) as queue:
        while True:
            try:
                reply = queue.get("/tasks/next", params={"worker": f"python-{os.getpid()}"})
            except httpx.ConnectError:
                time.sleep(1)  # the run has not started yet
                continue
            if reply.status_code == 410:
                return  # the run has ended
            if reply.status_code == 200:
                taken = reply.json()
                try:
                    kind, report = "reward", work(taken)
                except Exception as error:  # noqa: BLE001 - reported to the run
                    kind, report = "failure", {"message": f"{type(error).__name__}: {error}"}
                queue.post(f"/trajectories/{taken['attempt_id']}/{kind}", json=report)


if __name__ == "__main__":
    main()
