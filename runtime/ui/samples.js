// What does /metrics say? One reading, and what has grown since an earlier one.

export class Samples {
  constructor(text) {
    this.byName = new Map();
    for (const line of text.split("\n")) {
      const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
      if (!match) continue;
      const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
      if (!this.byName.has(match[1])) this.byName.set(match[1], []);
      this.byName.get(match[1]).push([labels, Number(match[3])]);
    }
  }

  all(name) { return this.byName.get(name) ?? []; }

  value(name, labels = {}) {
    const found = this.all(name).find(([own]) => Object.entries(labels).every(([k, v]) => own[k] === v));
    return found ? found[1] : 0;
  }

  sum(name) { return this.all(name).reduce((total, [, value]) => total + value, 0); }

  grown(before, name) { return this.sum(name) - before.sum(name); }

  // Of a histogram, within the bucket by proportion; null where nothing was counted since `before` (null: ever).
  quantile(before, name, share) {
    const counts = this.all(`${name}_bucket`).map(([labels, n]) =>
      [labels.le === "+Inf" ? Infinity : Number(labels.le), n - (before ? before.value(`${name}_bucket`, { le: labels.le }) : 0)]);
    counts.sort((a, b) => a[0] - b[0]);
    const total = counts.length ? counts[counts.length - 1][1] : 0;
    if (!total) return null;
    let low = 0, below = 0;
    for (const [limit, n] of counts) {
      if (n >= share * total) return limit === Infinity ? low : low + ((limit - low) * (share * total - below)) / (n - below);
      [low, below] = [limit, n];
    }
    return low;
  }
}
