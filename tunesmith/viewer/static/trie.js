// The trie of a group: shared tokens once, one branch for each way it goes on.
import { html } from "./vendor/htm-preact.js";
import { useAnswer } from "./api.js";
import { num, plural, rewardColor } from "./format.js";
import { findRange, Loaded } from "./parts.js";
import { link } from "./route.js";

export function Trie({ id, step, group, rollouts }) {
  const answer = useAnswer(`trie/${id}/${step}/${group}`);
  const [low, high] = findRange(rollouts.map((each) => each.reward));
  return html`<${Loaded} answer=${answer}>${(data) => html`
    <p class="summary">${plural(data.num_tokens, "token")} instead of ${data.num_flat_tokens}: each shared prefix is computed once</p>
    <div class="trie">${data.nodes.map((node, index) => html`<div key=${index} class="node" data-row tabindex="-1" style=${{ marginLeft: `${node.depth * 22}px` }}>
      <span class="count" style=${{ borderColor: rewardColor(node.reward, low, high) || "" }}>${node.runs.length > 1 ? html`<span>${node.runs.length} rollouts</span>`
        : html`<a href=${link("rollout", [id, step, group, node.runs[0]])}>rollout ${node.runs[0]}</a>`} · reward ${num(node.reward)} · <span class="dim">${plural(node.num_tokens, "token")}</span></span>
      <div class="nodetext" tabindex="0">${node.parts.map((part, number) => html`<span key=${number} class=${part.sampled ? "sampled" : "context"}>${part.text}</span>`)}
        ${node.ends.length > 1 && html`<span class="ends">${node.ends.map((run) => html`<a key=${run} href=${link("rollout", [id, step, group, run])}>${run}</a> `)}</span>`}</div>
    </div>`)}</div>`}<//>`;
}
