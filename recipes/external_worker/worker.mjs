// A worker of `tunesmith serve` in JavaScript: takes tasks, asks the model, posts rewards.
import OpenAI from "openai";

const url = process.env.TUNESMITH_URL ?? "http://127.0.0.1:8765";

async function work({ task, base_url, api_key, model, deadline_s }) {
  const client = new OpenAI({ baseURL: base_url, apiKey: api_key, timeout: 1000 * deadline_s });
  const messages = [{ role: "user", content: task.question }];
  const completion = await client.chat.completions.create({ model, messages });
  const answer = completion.choices[0].message.content ?? "";
  const isRight = answer.match(/\d+/g)?.at(-1) === task.answer;
  return { reward: Number(isRight) - 0.001 * answer.length, response: answer, metrics: { accuracy: Number(isRight) } };
}

async function post(path, body) {
  await fetch(url + path, { method: "POST", body: JSON.stringify(body) });
}

for (;;) {
  const reply = await fetch(`${url}/tasks/next?worker=node-${process.pid}`).catch(() => null);
  if (reply?.status === 410) break; // the run has ended
  if (reply?.status !== 200) {
    if (reply === null) await new Promise((resolve) => setTimeout(resolve, 1000)); // the run has not started yet
    continue;
  }
  const taken = await reply.json();
  const path = `/trajectories/${taken.attempt_id}`;
  try {
    await post(`${path}/reward`, await work(taken));
  } catch (error) {
    await post(`${path}/failure`, { message: String(error) });
  }
}
