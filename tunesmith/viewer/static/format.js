// Numbers as short text, and colors.
export const COLORS = ["#3b7dd8", "#e07b39", "#2a9d6f", "#c94f7c", "#8661c1", "#b8902c", "#3aa6b9", "#7f8c5a"];

export function runColor(number) {
  return COLORS[number % COLORS.length];
}

export function num(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : digits);
}

export function duration(seconds) {
  const [size, unit] = seconds < 100 ? [1, "s"] : seconds < 6000 ? [60, "min"] : [3600, "h"];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

export function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${num(value)}`;
}

export function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

// From vermilion to bluish green, which people with any color vision tell apart.
export function rewardColor(value, low, high) {
  if (value === null || value === undefined) return null;
  const share = high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0;
  const mix = (from, to) => Math.round(from + (to - from) * Math.min(Math.max(share, 0), 1));
  return `rgb(${mix(213, 0)}, ${mix(94, 158)}, ${mix(0, 115)})`;
}

export function listSteps(ranges) {
  return ranges.flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, index) => first + index));
}
