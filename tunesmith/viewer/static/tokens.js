// A trajectory as tokens, colored by logprob, mask, advantage or policy version.
import { html, useState } from "./vendor/htm-preact.js";
import { COLORS, num, signed } from "./format.js";
import { Note } from "./parts.js";

export const COLORINGS = [["logprob", "logprob"], ["mask", "mask"], ["advantage", "advantage"], ["version", "policy version"]];
const PAGE = 4000;
const MASKS = ["context, not sampled here", "sampled and trained", "sampled, not trained"];

function alpha(color, share) {
  return `rgb(${color} / ${Math.min(Math.max(share, 0), 1).toFixed(3)})`;
}

// Background of a token; null leaves it plain.
export function tokenColor(tokens, index, coloring, scale) {
  if (tokens.mask[index] === 0) return null;
  if (coloring === "mask") return tokens.mask[index] === 1 ? alpha("42 157 111", 0.32) : alpha("224 123 57", 0.4);
  if (coloring === "advantage") {
    const value = tokens.advantage[index];
    return value === null ? null : alpha(value < 0 ? "213 94 0" : "59 125 216", (0.75 * Math.abs(value)) / scale);
  }
  if (coloring === "version") {
    const version = tokens.version[index];
    return version === null ? null : `${COLORS[version % COLORS.length]}66`;
  }
  return alpha("213 94 0", (0.85 * -tokens.logprob[index]) / 4);
}

function Legend({ tokens, coloring, scale }) {
  const versions = [...new Set(tokens.version.filter((value) => value !== null))].sort((a, b) => a - b);
  const items = {
    logprob: [1, 0.5, 0.14, 0.02].map((share) => [alpha("213 94 0", (0.85 * -Math.log(share)) / 4), `${Math.round(share * 100)} %`]),
    mask: [[alpha("42 157 111", 0.32), "trained"], [alpha("224 123 57", 0.4), "sampled, not trained"]],
    advantage: [[alpha("213 94 0", 0.75), signed(-scale)], [alpha("59 125 216", 0.75), signed(scale)]],
    version: versions.map((version) => [`${COLORS[version % COLORS.length]}66`, `version ${version}`]),
  }[coloring];
  return html`<span class="legend">${items.map(([color, label]) => html`<span key=${label}><i style=${{ background: color }}></i>${label}</span>`)}
    <span class="context">context</span></span>`;
}

function describe(tokens, index) {
  const parts = [`token ${index}`, `id ${tokens.id[index]}`, MASKS[tokens.mask[index]]];
  if (tokens.logprob[index] !== null) parts.push(`logprob ${num(tokens.logprob[index])} (${(100 * Math.exp(tokens.logprob[index])).toFixed(1)} %)`);
  if (tokens.advantage[index] !== null) parts.push(`advantage ${signed(tokens.advantage[index])}`);
  if (tokens.version[index] !== null) parts.push(`policy version ${tokens.version[index]}`);
  return parts.join(" · ");
}

export function Tokens({ tokens, coloring }) {
  const [hovered, setHovered] = useState(null);
  const [end, setEnd] = useState(PAGE);
  if (!tokens.text.length) return html`<${Note}>There are no tokens.<//>`;
  const scale = Math.max(1e-9, ...tokens.advantage.map((value) => Math.abs(value ?? 0)));
  const hover = (event) => {
    const index = event.target.dataset?.i;
    setHovered(index === undefined ? null : Number(index));
  };
  return html`<div class="tokenview"><div class="tokenbar"><${Legend} tokens=${tokens} coloring=${coloring} scale=${scale} />
      <span class="tokeninfo" aria-live="polite">${hovered === null ? `${tokens.text.length} tokens, ${tokens.mask.filter(Boolean).length} sampled` : describe(tokens, hovered)}</span></div>
    <div class="tokens" onMouseOver=${hover} onMouseLeave=${() => setHovered(null)}>${tokens.text.slice(0, end).map((text, index) => html`<span
      key=${index} data-i=${index} class=${tokens.mask[index] ? "sampled" : "context"}
      style=${{ background: tokenColor(tokens, index, coloring, scale) || "" }}>${text.replaceAll("\n", "↵\n")}</span>`)}</div>
    ${end < tokens.text.length && html`<button onClick=${() => setEnd(end + PAGE)}>show more of ${tokens.text.length} tokens</button>`}</div>`;
}
