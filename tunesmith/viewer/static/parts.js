// Small components that several pages use.
import { html, useLayoutEffect, useState } from "./vendor/htm-preact.js";
import { num, rewardColor, signed } from "./format.js";
import { setParams } from "./route.js";

export const LONG_TEXT = 3000;

export function Note({ children }) {
  return html`<p class="note">${children}</p>`;
}

export function Failed({ message }) {
  return html`<p class="note error" role="alert">${message}</p>`;
}

// Shows the answer with `children(data)`, or why there is none.
export function Loaded({ answer, children }) {
  if (answer.error) return html`<${Failed} message=${answer.error} />`;
  return answer.data ? children(answer.data) : html`<${Note}>Loading<//>`;
}

export function Reward({ value }) {
  return value === null || value === undefined
    ? html`<span class="reward failed">failed</span>`
    : html`<span class="reward">${num(value)}</span>`;
}

export function Advantage({ value, scale = 2 }) {
  if (value === null || value === undefined) return html`<span class="dim">–</span>`;
  const width = `${Math.min(Math.abs(value) / scale, 1) * 50}%`;
  const side = value < 0 ? { right: "50%", width } : { left: "50%", width };
  return html`<span class="advantage">
    <span class="bar"><i class=${value < 0 ? "negative" : "positive"} style=${side}></i></span>${signed(value)}</span>`;
}

// One cell for each rollout, colored by reward.
export function Rewards({ rewards, low = 0, high = 1, names = null }) {
  const columns = { gridTemplateColumns: `repeat(${Math.min(rewards.length, names ? 30 : 16)}, 10px)` };
  return html`<span class="strip" style=${columns}>${rewards.map((value, index) => html`<i
    key=${index} class=${value === null ? "failed" : ""} title=${`${names ? names[index] : `rollout ${index}`}: ${value === null ? "failed" : num(value)}`}
    style=${{ background: rewardColor(value, low, high) || "" }}></i>`)}</span>`;
}

export function findRange(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? [Math.min(0, ...known), Math.max(...known)] : [0, 1];
}

// Rows under named columns: [name, class, cell of a row]. On a narrow screen each row is a card of named cells.
export function Table({ columns, rows, keyOf = null, className = "list", rowClass = () => "" }) {
  const shown = columns.filter(Boolean);
  return html`<table class=${className}><thead><tr>${shown.map(([name, kind]) => html`<th key=${name} class=${kind}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${keyOf ? keyOf(row) : index} data-row tabindex="-1" class=${rowClass(row, index)}>${
      shown.map(([name, kind, cell]) => html`<td key=${name} data-name=${name} class=${kind}>${cell(row, index)}</td>`)}</tr>`)}</tbody></table>`;
}

// Bars with their titles; `others` are drawn as outlines in the same scale.
export function Bars({ counts, titles, height = 24, className = "", others = null }) {
  const top = Math.max(...counts, ...(others || []), 1e-9);
  const size = (count) => `${Math.round((height * count) / top)}px`;
  return html`<div class="histogram ${className}" style=${{ height: `${height + 2}px` }} aria-hidden="true">${counts.map((count, index) => html`<span key=${index} title=${titles[index]}>
    <i style=${{ height: size(count) }}></i>${others && others[index] > 0 && html`<u style=${{ height: size(others[index]) }}></u>`}</span>`)}</div>`;
}

export function LongText({ text, className = "" }) {
  const [isOpen, setOpen] = useState(false);
  const isLong = text.length > LONG_TEXT;
  return html`<div class="text ${className}">${isLong && !isOpen ? text.slice(0, LONG_TEXT) : text}${
    isLong && html`<button class="more" onClick=${() => setOpen(!isOpen)}>${
      isOpen ? "show less" : `… show all ${text.length} characters`}</button>`}</div>`;
}

export function Fields({ row }) {
  return html`<dl class="fields">${Object.entries(row).map(([name, value]) => html`<dt key=${name}>${name}</dt>
    <dd><${LongText} text=${typeof value === "string" ? value : JSON.stringify(value)} /></dd>`)}</dl>`;
}

export function Tabs({ name, value, options }) {
  return html`<span class="tabs" role="tablist">${options.map(([key, label]) => html`<button key=${key} role="tab"
    aria-selected=${key === value} class=${key === value ? "on" : ""}
    onClick=${() => setParams({ [name]: key })}>${label}</button>`)}</span>`;
}

// An input that writes one setting into the URL when typing ends. What is typed stays when the page is drawn again.
export function Filter({ name, label, value, type = "text", width = 110, isMain = false, placeholder = "" }) {
  const [typed, setTyped] = useState(null);
  useLayoutEffect(() => setTyped(null), [value]); // before the browser paints: later it would erase what was typed meanwhile
  return html`<label class="filter">${label}<input type=${type} step="any" value=${typed ?? value ?? ""} placeholder=${placeholder}
    data-main=${isMain ? "" : undefined} style=${{ width: `${width}px` }} onInput=${(event) => setTyped(event.target.value)}
    onChange=${(event) => setParams({ [name]: event.target.value.trim(), page: "" })} /></label>`;
}

export function Choice({ name, label, value, options }) {
  return html`<label class="filter">${label}<select value=${value || ""} onChange=${(event) => setParams({ [name]: event.target.value, page: "" })}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === (value || "")}>${text}</option>`)}</select></label>`;
}
