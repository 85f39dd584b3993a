"""Style sheet of the report."""

STYLE = """
:root { --ink: #1f2933; --quiet: #5b6776; --line: #e3e8ee; --paper: #ffffff; --wash: #f6f8fa; --accent: #0f766e; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 28px 64px; }
header { margin-bottom: 24px; }
.kicker { margin: 0; color: var(--accent); font-size: 12px; font-weight: 600; letter-spacing: .09em;
  text-transform: uppercase; }
h1 { margin: 2px 0 0; font-size: 32px; line-height: 1.2; letter-spacing: -.02em; }
.sub { margin: 4px 0 0; color: var(--quiet); }
h2 { margin: 36px 0 10px; font-size: 18px; letter-spacing: -.01em; }
.lead { max-width: 78ch; font-size: 16.5px; margin: 22px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  display: flex; flex-direction: column; }
.card span { color: var(--quiet); font-size: 13px; }
.card strong { font-size: 28px; line-height: 1.25; letter-spacing: -.02em; }
.card small { color: var(--quiet); font-size: 12.5px; }
.card.bad { border-color: #b91c1c; } .card.bad strong { color: #b91c1c; }
.missing { background: #fff8e6; border: 1px solid #efd9a0; border-radius: 10px; padding: 12px 16px; margin: 16px 0; }
.missing ul { margin: 4px 0 0; padding-left: 20px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 16px; }
figure { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; margin: 0; padding: 16px 18px; }
figure h2 { margin: 0 0 8px; font-size: 16px; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { margin-top: 8px; color: var(--quiet); font-size: 13px; }
.scroll { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
thead th { color: var(--quiet); font-size: 12.5px; font-weight: 600; vertical-align: bottom; }
.scroll th, .scroll td { padding: 8px 12px; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
.scroll thead th { border-top: 0; white-space: normal; }
.scroll th:first-child, .scroll td:first-child { text-align: left; }
.scroll tr.best td { font-weight: 650; background: #eef7f5; }
pre { background: #16202b; color: #e6edf3; border-radius: 10px; padding: 14px 16px; overflow-x: auto; margin: 0;
  font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.facts { font-size: 13.5px; }
.facts th { text-align: left; vertical-align: top; color: var(--quiet); font-weight: 500; width: 190px; }
.facts th, .facts td { padding: 6px 12px 6px 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
@media print { body { background: #fff; } figure, .card { break-inside: avoid; } }
"""
