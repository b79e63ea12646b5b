// Evaluation questions with the answers of models next to each other; the files of a run's settings.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, rewardColor, runColor } from "./format.js";
import { Choice, Fields, Filter, Loaded, LongText, Note } from "./parts.js";
import { setParams } from "./route.js";

export function defaultColumns(columns) {
  return columns.length > 1 ? [columns[0].key, columns[columns.length - 1].key] : columns.map((column) => column.key);
}

export function Evaluations({ app, params }) {
  const answer = useAnswer("evaluations", {}, app.version);
  return html`<section class="page"><${Loaded} answer=${answer}>${({ sets }) => {
    const names = Object.keys(sets);
    if (!names.length) return html`<${Note}>No run has been evaluated. Evaluations come from eval_datasets of a run file, or from tunesmith eval --out.<//>`;
    const name = names.includes(params.set) ? params.set : names[0];
    return html`<${EvaluationSet} name=${name} names=${names} columns=${sets[name]} params=${params} version=${app.version} />`;
  }}<//></section>`;
}

function EvaluationSet({ name, names, columns, params, version }) {
  const known = new Map(columns.map((column) => [column.key, column]));
  const asked = (params.columns || "").split(",").filter((key) => known.has(key));
  const chosen = asked.length ? asked : defaultColumns(columns);
  const toggle = (key) => setParams({ columns: columns.map((each) => each.key).filter((each) => (each === key) !== chosen.includes(each)).join(","), page: "" });
  const answer = useAnswer("answers", { set: name, columns: chosen.join(","), text: params.text, show: params.show, page: params.page }, version);
  return html`<div class="bar">${names.length > 1 && html`<${Choice} name="set" label="set " value=${name} options=${names.map((each) => [each, each])} />`}
      <${Filter} name="text" label="text " value=${params.text} isMain=${true} width=${170} placeholder="in questions and answers" />
      <${Choice} name="show" label="show " value=${params.show} options=${[["", "all questions"], ["differ", "where rewards differ"], ["wrong", "not solved by the last"]]} /></div>
    <div class="columns">${columns.map((column) => html`<label key=${column.key} class=${chosen.includes(column.key) ? "on" : ""}>
      <input type="checkbox" checked=${chosen.includes(column.key)} onChange=${() => toggle(column.key)} style=${{ accentColor: runColor(column.run) }} />
      ${column.label} <b>${num(column.mean)}</b> <span class="dim">${column.low === null ? "" : `${num(column.low)} to ${num(column.high)}`}</span></label>`)}</div>
    <${Loaded} answer=${answer}>${(data) => html`<${Answers} data=${data} columns=${chosen.map((key) => known.get(key))} params=${params} />`}<//>`;
}

function Answers({ data, columns, params }) {
  const page = Number(params.page || 0);
  const pages = Math.ceil(data.num_rows / data.page_rows);
  return html`<p class="summary">${data.num_rows} of ${data.num_tasks} questions ${pages > 1 ? html`
      <button data-key="[" disabled=${page === 0} onClick=${() => setParams({ page: page - 1 || "" })}>◂</button> page ${page + 1} of ${pages}
      <button data-key="]" disabled=${page + 1 >= pages} onClick=${() => setParams({ page: page + 1 })}>▸</button>` : ""}</p>
    <table class="list answers"><thead><tr><th>question</th>${columns.map((column) => html`<th key=${column.key}>${column.label}</th>`)}</tr></thead>
    <tbody>${data.rows.map((row) => html`<tr key=${row.task_id} data-row tabindex="-1"><td>${Object.keys(row.row).length
      ? html`<details><summary>${row.title} <span class="dim">${row.task_id}</span></summary><${Fields} row=${row.row} /></details>` : row.task_id}</td>
      ${row.cells.map((cell, index) => html`<td key=${columns[index].key}>${cell ? html`<${Cell} cell=${cell} />` : html`<span class="dim">–</span>`}</td>`)}</tr>`)}</tbody></table>`;
}

function Cell({ cell }) {
  return html`<div class="answer"><span class="score" style=${{ borderColor: rewardColor(cell.mean, 0, 1) || "" }}>${num(cell.mean)}</span>
    <div>${cell.answers.map((text, index) => html`<${LongText} key=${index} text=${text || "(empty)"} />`)}
    ${cell.failures.map((text, index) => html`<div key=${index} class="error">${text}</div>`)}</div></div>`;
}

function flatten(values, prefix = "") {
  return Object.entries(values).flatMap(([key, value]) => (value && typeof value === "object" && !Array.isArray(value)
    ? flatten(value, `${prefix}${key}.`) : [[`${prefix}${key}`, JSON.stringify(value)]]));
}

export function Config({ app, args, params }) {
  const id = Number(args[0] || 0);
  const run = app.runs[id];
  const other = params.with === undefined || params.with === "" ? null : Number(params.with);
  const answer = useAnswer(run ? `config/${id}` : null);
  const compared = useAnswer(other === null ? null : `config/${other}`);
  if (!run) return html`<${Note}>There is no such run.<//>`;
  return html`<section class="page"><div class="bar"><${Filter} name="key" label="key " value=${params.key} isMain=${true} />
      <${Choice} name="with" label="differences from " value=${params.with} options=${[["", "none"], ...app.runs.filter((each) => each.id !== id).map((each) => [String(each.id), each.name])]} />
      <span class="dim">${run.path}</span></div><${Loaded} answer=${answer}>${(data) => {
    const values = new Map(flatten(data.config));
    const others = compared.data ? new Map(flatten(compared.data.config)) : null;
    const keys = [...new Set([...values.keys(), ...(others ? others.keys() : [])])].sort()
      .filter((key) => key.includes(params.key || "") && (!others || values.get(key) !== others.get(key)));
    return html`<table class="list"><thead><tr><th>key</th><th>${run.name}</th>${others && html`<th>${app.runs[other].name}</th>`}</tr></thead>
      <tbody>${keys.map((key) => html`<tr key=${key} data-row tabindex="-1"><td>${key}</td><td>${values.get(key) ?? "–"}</td>${others && html`<td>${others.get(key) ?? "–"}</td>`}</tr>`)}</tbody></table>`;
  }}<//></section>`;
}
