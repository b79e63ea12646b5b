// One rollout: its conversation with tool calls, its tokens, its failure.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, plural, signed } from "./format.js";
import { Advantage, Choice, Fields, Loaded, LongText, Note, Reward, Tabs } from "./parts.js";
import { go, link } from "./route.js";
import { COLORINGS, Tokens } from "./tokens.js";

// Arguments of a tool call: text with lines, such as code, as it is; the rest as JSON.
function formatArguments(text) {
  try {
    const values = JSON.parse(text);
    return Object.entries(values).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value, null, 1)]);
  } catch {
    return [["arguments", text]];
  }
}

function Message({ message }) {
  const facts = [];
  if (message.sampled) {
    facts.push(`turn ${message.turn + 1}`, plural(message.num_tokens, "token"), `ended by ${message.stop_reason}`);
    if (message.logprob !== null) facts.push(`mean logprob ${num(message.logprob)}`);
    facts.push(message.trained ? `advantage ${signed(message.advantage)}` : "not trained", `policy version ${message.versions.join(", ")}`);
  }
  return html`<article class=${`message ${message.role} ${message.sampled ? "sampled" : ""}`} data-row tabindex="-1">
    <header><b>${message.role}</b><span class="dim">${facts.join(" · ")}</span></header>
    ${message.reasoning && html`<details class="reasoning" open><summary>reasoning</summary><${LongText} text=${message.reasoning} /></details>`}
    ${message.content.trim() && html`<${LongText} text=${message.content.replace(/^\n+|\n+$/g, "")} />`}
    ${(message.tool_calls || []).map((call, index) => html`<div key=${index} class="call"><b>${call.name}</b>
      ${formatArguments(call.arguments).map(([name, value]) => html`<div key=${name} class="argument"><span class="dim">${name}</span> <code>${value}</code></div>`)}</div>`)}
  </article>`;
}

function Failure({ failure }) {
  return html`<div class="failure" role="alert"><b>failed in ${failure.where}</b> ${failure.message}
    ${failure.line && html`<div class="dim">${failure.line}</div>`}${failure.traceback && html`<pre>${failure.traceback}</pre>`}</div>`;
}

function Facts({ data }) {
  const metrics = Object.entries(data.metrics).map(([name, value]) => `${name} ${num(value)}`);
  return html`<p class="summary"><span>reward <${Reward} value=${data.reward} /></span>
    <span>advantage ${data.advantage === null ? "none, not trained" : html`<${Advantage} value=${data.advantage} />`}</span>
    ${data.turn_advantages && html`<span>by turn ${data.turn_advantages.map(signed).join(", ")}</span>`}
    <span>${plural(data.num_turns, "turn")}</span><span>${plural(data.num_tokens, "sampled token")}</span><span>${num(data.duration_s, 1)} s</span>
    ${metrics.map((text) => html`<span key=${text} class="dim">${text}</span>`)}</p>`;
}

export function Rollout({ app, args, params }) {
  const [id, step, group, number] = args.map(Number);
  const run = app.runs[id];
  const answer = useAnswer(run ? `rollout/${id}/${step}/${group}/${number}` : null);
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page"><${Loaded} answer=${answer}>${(data) => html`<${Loadedrollout} run=${run} data=${data} params=${params} />`}<//></section>`;
}

function Loadedrollout({ run, data, params }) {
  const view = params.view || (data.has_text ? "conversation" : "tokens");
  const coloring = params.color || "logprob";
  const branches = view === "tokens" ? data.tokens : data.conversations;
  const branch = Math.min(Number(params.branch || 0), Math.max(branches.length - 1, 0));
  const at = data.siblings.indexOf(data.run);
  const move = (by) => data.siblings[at + by] !== undefined && go("rollout", [run.id, data.step, data.group, data.siblings[at + by]], params);
  const next = COLORINGS[(COLORINGS.findIndex(([key]) => key === coloring) + 1) % COLORINGS.length][0];
  return html`<div class="bar">
      <a data-key="u" href=${link("group", [run.id, data.step, data.group])}>step ${data.step} group ${data.group}</a>
      <span class="picker"><button data-key="[" title="previous rollout ([)" disabled=${at <= 0} onClick=${() => move(-1)}>◂</button>
        rollout ${data.run} <span class="dim">of ${data.siblings.length}</span>
        <button data-key="]" title="next rollout (])" disabled=${at >= data.siblings.length - 1} onClick=${() => move(1)}>▸</button></span>
      <${Tabs} name="view" value=${view} options=${[["conversation", "conversation"], ["tokens", "tokens"]]} />
      <a hidden data-key="t" href=${link("rollout", [run.id, data.step, data.group, data.run], { ...params, view: view === "tokens" ? "conversation" : "tokens" })}>toggle</a>
      <a hidden data-key="c" href=${link("rollout", [run.id, data.step, data.group, data.run], { ...params, view: "tokens", color: next })}>color</a>
      ${view === "tokens" && html`<${Tabs} name="color" value=${coloring} options=${COLORINGS} />`}
      ${branches.length > 1 && html`<${Choice} name="branch" label="conversation " value=${String(branch)}
        options=${branches.map((_, index) => [String(index), `${index + 1} of ${branches.length}`])} />`}
      <a href=${link("task", [run.id], { id: data.task_id, before: `${run.id}/${data.step}/${data.group}/${data.run}` })}>compare with another step</a></div>
    <${Facts} data=${data} />
    ${data.failure && html`<${Failure} failure=${data.failure} />`}
    <details class="task"><summary>${data.task_id}</summary><${Fields} row=${data.row} /></details>
    ${!data.has_text && html`<${Note}>No tokenizer.json was found in a checkpoint of the run or at its model's path, so tokens are shown as ids.<//>`}
    ${view === "tokens" ? (branches.length ? html`<${Tokens} tokens=${branches[branch]} coloring=${coloring} />` : html`<${Note}>No tokens were sampled.<//>`)
      : html`<div class="conversation">${branches.length ? branches[branch].messages.map((message, index) => html`<${Message} key=${index} message=${message} />`)
        : html`<${Note}>No model call was recorded.<//>`}</div>`}
    ${data.response && html`<details class="response"><summary>response that was judged</summary><${LongText} text=${data.response} /></details>`}`;
}
