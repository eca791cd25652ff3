"""The report's style sheet: light and dark by the reader's preference, and fit for print."""

CSS = """
:root { --page:#fbfaf8; --card:#ffffff; --ink:#24282d; --soft:#646b73; --rule:#e4e1dc; --accent:#0072B2;
  --good:#00795a; --warn:#b36b00; --bad:#b84a00; --code:#f4f2ee; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --page:#16181b; --card:#1e2125; --ink:#e4e4e2; --soft:#9aa0a6; --rule:#33373c; --accent:#56B4E9;
    --good:#2fbf97; --warn:#E69F00; --bad:#f08042; --code:#26292e; }
}
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink); font-size:15px; line-height:1.55;
  font-family:system-ui,-apple-system,Roboto,Helvetica,Arial,sans-serif; }
main { max-width:1120px; margin:0 auto; padding:36px 28px 80px; }
header h1 { font-size:27px; line-height:1.25; margin:0 0 6px; letter-spacing:-.01em; }
header .where { color:var(--soft); margin:0; }
h2 { font-size:19px; margin:44px 0 12px; padding-top:14px; border-top:1px solid var(--rule); }
h3 { font-size:15px; margin:22px 0 6px; }
a { color:var(--accent); }
nav { margin:14px 0 0; font-size:13.5px; color:var(--soft); }
nav a { margin-right:16px; text-decoration:none; }
.badge { display:inline-block; font-size:12.5px; font-weight:600; color:#fff; background:var(--soft);
  border-radius:4px;
  padding:1px 9px; vertical-align:3px; margin-right:10px; }
.badge.completed { background:#00795a; } .badge.failed, .badge.died { background:#b84a00; }
.badge.interrupted { background:#b36b00; } .badge.running { background:#0072B2; }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(165px,1fr)); gap:12px; margin:22px 0
  18px; }
.card { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:11px 14px; }
.card b { display:block; font-size:21px; line-height:1.25; font-weight:650; white-space:nowrap;
  font-variant-numeric:tabular-nums; }
.card span { color:var(--soft); font-size:12.5px; line-height:1.3; display:block; }
dl.story { display:grid; grid-template-columns:8.5em 1fr; gap:7px 16px; margin:0; }
dl.story dt { color:var(--soft); } dl.story dd { margin:0; }
ul.findings { list-style:none; padding:0; margin:0; } ul.findings li { padding-left:20px;
  position:relative; }
ul.findings li::before { content:""; position:absolute; left:2px; top:.5em; width:9px; height:9px;
  border-radius:2px;
  background:var(--soft); }
ul.findings li.odd::before { background:var(--warn); transform:rotate(45deg); }
ul.findings li.bad::before { background:var(--bad); border-radius:50%; }
.plots { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:14px; }
@media (max-width:860px) { .plots { grid-template-columns:1fr; } dl.story { grid-template-columns:1fr; } }
figure.plot { margin:0; background:var(--card); border:1px solid var(--rule); border-radius:8px;
  padding:6px;
  overflow:hidden; }
figure.plot img { max-width:100%; height:auto; display:block; margin:0 auto; border-radius:5px; }
figure.plot.wide { margin:10px 0; }
figcaption { color:var(--soft); font-size:12.5px; padding:2px 8px 4px; }
figcaption.drawn { font:11.5px/1.35 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; white-space:pre; overflow-x:auto; }
pre, code { font-size:12.5px; line-height:1.5;
  font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
pre { background:var(--code); border-radius:6px; padding:10px 13px; overflow:auto; margin:8px 0; }
pre.tall { max-height:30em; }
table { border-collapse:collapse; font-size:13.5px; font-variant-numeric:tabular-nums; margin:8px 0; }
th, td { text-align:left; padding:4px 18px 4px 0; border-bottom:1px solid var(--rule); vertical-align:top; }
th { color:var(--soft); font-weight:500; }
td.number, th.number { text-align:right; }
details { margin:8px 0; } summary { cursor:pointer; color:var(--soft); }
.columns { display:grid; grid-template-columns:repeat(3,minmax(0,1fr)); gap:0 28px; align-items:start; }
.columns table { font-size:12.5px; width:100%; } .columns td { overflow-wrap:anywhere; }
pre.wrap { white-space:pre-wrap; }
@media (max-width:860px) { .columns { grid-template-columns:1fr; } }
.example { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:10px 16px;
  margin:10px 0; }
.example .prompt { font-weight:600; margin:4px 0; white-space:pre-wrap; }
.facts, .legend { color:var(--soft); font-size:12.5px; margin:4px 0; }
.legend span { color:var(--ink); }
.failure { border-left:4px solid var(--bad); padding:2px 0 2px 16px; margin:18px 0; }
.failure h2 { border:0; margin:6px 0; padding:0; }
.notebook .cell { margin:10px 0; }
.notebook .input_area pre, .notebook .highlight pre { background:var(--code); border-left:2px solid
  var(--rule); }
.notebook .output_subarea, .notebook .output { overflow-x:auto; }
.notebook .output pre { background:none; padding:2px 13px; }
.notebook .output_error pre { border-left:3px solid var(--bad); }
.notebook h1 { font-size:21px; } .notebook h2 { font-size:17px; border:0; margin:22px 0 8px; padding:0; }
.notebook div.prompt { display:none; } .notebook .anchor-link { display:none; }
.notebook img { max-width:100%; }
.notebook .dataframe { border:0; } .notebook .dataframe th, .notebook .dataframe td { border-left:0;
  border-right:0; }
footer { color:var(--soft); font-size:12.5px; margin-top:48px; border-top:1px solid var(--rule);
  padding-top:12px; }
@media print { .plots { grid-template-columns:1fr; } body { background:#fff; } }
"""
