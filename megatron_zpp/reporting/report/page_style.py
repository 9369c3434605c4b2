"""The style of a report's page, which is inside the page: it needs no network."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #667080; --grid: #e4e7ec; --accent: #2563b0;
  --series-0: #2563b0; --series-1: #d9662b; --series-2: #2f8f5b; --series-3: #8a4fbf; --series-4: #b8912a;
  --series-5: #5b6776; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1d2127; --text: #e6e9ee; --muted: #97a1b0; --grid: #2e343d; --accent: #6aa5ec;
  --series-0: #6aa5ec; --series-1: #f0975f; --series-2: #63c48f; --series-3: #bb8fe6; --series-4: #dcb95c;
  --series-5: #9aa6b6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 12px; }
.sub, .note { color: var(--muted); margin: 0; font-size: 13.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 12px;
  margin: 20px 0 8px; }
.tile, .chart, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 11px 14px; } .tile b { display: block; font-size: 21px; font-weight: 600; line-height: 1.3;
  font-variant-numeric: tabular-nums; } .tile span { color: var(--muted); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
.chart { margin: 0; padding: 14px 14px 8px; } .chart svg { width: 100%; display: block; }
figcaption { font-weight: 600; font-size: 14.5px; margin: 0 4px 6px; }
.card { padding: 4px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
tr:last-child td { border-bottom: 0; } th { color: var(--muted); font-weight: 500; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.flag { display: inline-block; margin-right: 18px; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); font-size: 14px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; }
"""
