// One run: how it stands, what the doctor finds, the user's notes, and its settings.
import { html, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { report, sendNotes, useAnswer } from "./api.js";
import { plural } from "./format.js";
import { Choice, Failed, Filter, Loaded, Note, Table } from "./parts.js";
import { link } from "./route.js";

export function Run({ app, args, params }) {
  const run = app.runs[Number(args[0] || 0)];
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page"><${Standing} run=${run} /><${Notes} key=${run.id} run=${run} reload=${app.reload} />
    <${Diagnosis} run=${run} version=${app.version} /><${Settings} run=${run} runs=${app.runs} params=${params} /></section>`;
}

function Standing({ run }) {
  return html`<h2 class="title">${run.name} <span class="state ${run.state}">${run.state}</span></h2>
    <p class="summary"><span>step ${run.last_step}${run.total_steps ? ` of ${run.total_steps}` : ""}</span>${run.algorithm && html`<span>${run.algorithm}</span>`}
      ${run.model && html`<span>${run.model}</span>`}<span>${run.path}</span>${run.steps.length > 0 && html`<a href=${link("step", [run.id, "latest"])}>rollouts</a>`}</p>
    ${run.error && html`<div class="failure" role="alert"><b>stopped at step ${run.error.step} by ${run.error.error}</b> ${run.error.message}</div>`}
    ${run.stop_reason && html`<p class="stopped"><b>stopped early</b> ${run.stop_reason}</p>`}`;
}

export function Tags({ tags }) {
  return tags.map((tag) => html`<a key=${tag} class="tag" href=${link("curves", [], { runs: tag })}>${tag}</a>`);
}

// What is typed stays until the server has it.
function Notes({ run, reload }) {
  const saved = { note: run.note, tags: run.tags.join(", ") };
  const [typed, setTyped] = useState(null);
  const [error, setError] = useState(null);
  useLayoutEffect(() => setTyped(null), [saved.note, saved.tags]); // before the browser paints, as in parts.js
  if (report) return html`<p class="summary"><${Tags} tags=${run.tags} /> <span class="text">${run.note}</span></p>`;
  const shown = typed || saved;
  const isChanged = shown.note !== saved.note || shown.tags !== saved.tags;
  const save = (event) => {
    event.preventDefault();
    const tags = shown.tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    sendNotes(run.id, { note: shown.note, tags }).then(() => { setError(null); setTyped({ note: shown.note, tags: tags.join(", ") }); reload(); },
      (failed) => setError(failed.message));
  };
  return html`<form class="notes" onSubmit=${save}>
    <label>tags <input value=${shown.tags} placeholder="baseline, seed 1" onInput=${(event) => setTyped({ ...shown, tags: event.target.value })} /></label>
    <label>note <textarea rows=${Math.max(2, shown.note.split("\n").length)} value=${shown.note} onInput=${(event) => setTyped({ ...shown, note: event.target.value })}></textarea></label>
    <button disabled=${!isChanged}>${isChanged || !(saved.note || saved.tags) ? "save" : "saved"}</button>${error && html`<${Failed} message=${error} />`}</form>`;
}

function Diagnosis({ run, version }) {
  const answer = useAnswer(run.is_checked ? `diagnosis/${run.id}` : null, {}, version);
  if (!run.is_checked) return null;
  return html`<h2>Findings of tunesmith doctor</h2><${Loaded} answer=${answer}>${(data) => html`
    ${data.findings.map((finding) => html`<article key=${finding.check} class="finding is-${finding.severity}" data-row tabindex="-1">
      <header><b>${finding.severity}</b> <span class="dim">${finding.check}</span></header><div>${finding.problem}</div>
      ${finding.evidence.map((each, index) => html`<div key=${index} class="dim">${each.source}: ${each.observed}${each.steps ? `, steps ${each.steps.join(" to ")}` : ""}</div>`)}
      <div><b>change</b> ${finding.change}</div></article>`)}
    ${data.findings.length === 0 && html`<p class="summary">no finding</p>`}
    <details class="passed"><summary>${plural(data.passed.length, "check")} within limits, ${data.not_checked.length} not recorded or of no use here</summary>
      <${Table} rows=${data.passed} columns=${[["check", "", (each) => each.check], ["figure", "main", (each) => each.figure]]} />
      <p class="dim">not checked: ${data.not_checked.join(", ")}</p></details>`}<//>`;
}

function flatten(values, prefix = "") {
  return Object.entries(values).flatMap(([key, value]) => (value && typeof value === "object" && !Array.isArray(value)
    ? flatten(value, `${prefix}${key}.`) : [[`${prefix}${key}`, JSON.stringify(value)]]));
}

function Settings({ run, runs, params }) {
  const other = runs[params.with || -1];
  const answer = useAnswer(`config/${run.id}`);
  const compared = useAnswer(other ? `config/${other.id}` : null);
  return html`<h2>Settings</h2><div class="bar"><${Filter} name="key" label="key " value=${params.key} isMain=${true} />
      <${Choice} name="with" label="differences from " value=${params.with} options=${[["", "none"], ...runs.filter((each) => each.id !== run.id).map((each) => [String(each.id), each.name])]} /></div>
    <${Loaded} answer=${answer}>${(data) => {
    const values = new Map(flatten(data.config));
    const others = compared.data && new Map(flatten(compared.data.config));
    const keys = [...new Set([...values.keys(), ...(others ? others.keys() : [])])].sort()
      .filter((key) => key.includes(params.key || "") && (!others || values.get(key) !== others.get(key)));
    return html`<${Table} className="list settings" rows=${keys} keyOf=${(key) => key} columns=${[["key", "", (key) => key], [run.name, "main", (key) => values.get(key) ?? "–"],
      others && [other.name, "main", (key) => others.get(key) ?? "–"]]} />`;
  }}<//>`;
}
