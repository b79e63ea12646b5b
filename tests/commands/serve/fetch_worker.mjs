// A worker with nothing but what Node.js has.
const url = process.env.TUNESMITH_URL;

async function post(path, body) {
  const reply = await fetch(path, { method: "POST", body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

for (;;) {
  const reply = await fetch(`${url}/tasks/next?worker=fetch`).catch(() => null);
  if (reply?.status === 410) break;
  if (reply?.status !== 200) {
    if (reply === null) await new Promise((resolve) => setTimeout(resolve, 200));
    continue;
  }
  const { attempt_id, task, base_url, model } = await reply.json();
  const messages = [{ role: "user", content: task.question }];
  const completion = await post(`${base_url}/chat/completions`, { model, messages });
  const answer = completion.choices[0].message.content ?? "";
  await post(`${url}/trajectories/${attempt_id}/reward`, { reward: answer.length % 7, response: answer });
}
