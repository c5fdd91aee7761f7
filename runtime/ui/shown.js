// How are numbers and elements made?

export function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(1000 * seconds).toPrecision(seconds < 0.01 ? 2 : 3)} ms`;
  if (seconds < 120) return `${seconds.toPrecision(3)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toPrecision(3)} ${units[unit]}`;
}

export function count(n) {
  return Number(n ?? 0).toLocaleString("en");
}
