"""The style sheet of all pages: quiet, one accent, the same in light, dark and print; no fonts but those that are there.

Colours of curves differ in lightness as well as in hue, and dashes tell them apart where there is no colour.
"""

STYLE = """
:root{--ink:#1d2430;--soft:#5b6675;--faint:#8a94a3;--paper:#fff;--ground:#f5f6f8;--rule:#dfe3e8;
--good:#1d7a4f;--fair:#a86200;--bad:#b3261e;--open:#4a5a70;
--c1:#1b5fa8;--c2:#c8550f;--c3:#20252d;--c4:#2f8f83;--c5:#8a4fa3;--c6:#9a7b00;--shade:#14507f}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a5afbd;--faint:#7d8898;--paper:#14181e;
--ground:#1c222a;--rule:#313945;--good:#5ec596;--fair:#e9ac4f;--bad:#ff8a80;--open:#a9b8cc;
--c1:#74b3f2;--c2:#f59a5c;--c3:#e3e7ee;--c4:#62c6b8;--c5:#c99ae0;--c6:#d9bd4a;--shade:#8cc4f5}}
@media print{:root{--ink:#000;--soft:#444;--faint:#666;--paper:#fff;--ground:#fff;--rule:#ccc;
--good:#1d7a4f;--fair:#8a5000;--bad:#a3201a;--open:#333;
--c1:#1b5fa8;--c2:#c8550f;--c3:#20252d;--c4:#2f8f83;--c5:#8a4fa3;--c6:#9a7b00;--shade:#14507f}}
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
"Noto Sans","DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
body{margin:0}
main{max-width:70rem;margin:0 auto;padding:1.6rem 1rem 4rem}
.good{--accent:var(--good)}.fair{--accent:var(--fair)}.bad{--accent:var(--bad)}.open{--accent:var(--open)}
header .run{color:var(--soft);font-size:.9rem;margin:0 0 .9rem;overflow-wrap:anywhere}
.verdict{border-left:5px solid var(--accent);padding:.1rem 0 .1rem 1.1rem;margin:0 0 1.6rem}
.verdict .word{color:var(--accent);font-size:.82rem;font-weight:700;letter-spacing:.07em;text-transform:uppercase;margin:0}
h1{font-size:clamp(1.35rem,1rem + 1.9vw,2.05rem);line-height:1.2;font-weight:650;letter-spacing:-.012em;margin:.15rem 0 .6rem;
max-width:32em;text-wrap:balance}
h1,p,dd,li,summary,td:last-child,.mono td{overflow-wrap:anywhere}code{white-space:nowrap;overflow-wrap:normal}
p{max-width:44rem;margin:.4rem 0}
.verdict .state{color:var(--soft)}
.verdict.small{border-left-width:3px;margin:1.1rem 0}.verdict.small .word{letter-spacing:0;text-transform:none}
.next{margin:.9rem 0 0}.next b{display:block;font-size:.9rem}
.next ul{margin:.25rem 0 0;padding-left:1.15rem;max-width:44rem}.next li{margin:.12rem 0}
.six{display:grid;grid-template-columns:repeat(6,1fr);gap:1px;background:var(--rule);border:1px solid var(--rule);border-radius:8px;
overflow:hidden;margin:0 0 2.2rem}
.six div{background:var(--paper);padding:.7rem .85rem;min-width:0}
.six dt{color:var(--soft);font-size:.8rem;line-height:1.25}
.six dd{margin:.15rem 0 0;font-size:1.5rem;font-weight:620;font-variant-numeric:tabular-nums;line-height:1.2;letter-spacing:-.01em}
.six .unit{display:block;font-size:.78rem;font-weight:400;color:var(--soft);letter-spacing:0;line-height:1.3;margin-top:.15rem}
section{margin:2.4rem 0 0}
h2{font-size:1.12rem;font-weight:650;margin:0 0 .5rem;padding:0 0 .3rem;border-bottom:1px solid var(--rule)}
h3{font-size:.95rem;font-weight:650;margin:1.2rem 0 .3rem}
.remark{color:var(--soft);font-size:.88rem;max-width:44rem}
.grid-of-figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1.3rem 2rem;
margin:.9rem 0 .4rem}
figure{margin:0;min-width:0}
figcaption{font-size:.9rem;line-height:1.4;margin:0 0 .3rem}
.keys{display:block;color:var(--soft);font-size:.83rem}
.key{display:inline-block;margin-right:.95rem}.key .v{color:var(--ink);font-variant-numeric:tabular-nums}
.swatch{display:inline-block;width:1.05rem;height:0;border-top:3px solid currentColor;vertical-align:.24em;margin-right:.35rem}
.swatch.dashed{border-top-style:dashed}.swatch.dotted{border-top-style:dotted}
.swatch.block{height:.7rem;border:0;background:currentColor;vertical-align:-.05em;border-radius:2px}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}
.mute{color:var(--faint)}
.v-good{color:var(--good)}.v-fair{color:var(--fair)}.v-bad{color:var(--bad)}.v-open{color:var(--rule)}
svg{display:block;width:100%;height:auto;max-width:40rem}
svg text{font-size:13px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .label{fill:var(--soft);font-size:13px}
.grid{fill:none;stroke:var(--rule);stroke-width:1}.axis{fill:none;stroke:var(--faint);stroke-width:1}
.line{fill:none;stroke:currentColor;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.line.thin{stroke-width:1}.line.faint{stroke-opacity:.45}
.dashed{stroke-dasharray:6 4}.dotted{stroke-dasharray:1.5 4}
.error{fill:none;stroke:currentColor;stroke-width:1;stroke-opacity:.5}
.ring{fill:var(--paper);stroke:currentColor;stroke-width:2;stroke-dasharray:none}
.bar,.band{fill:currentColor}.bar{fill-opacity:.82}
.shade{fill:var(--shade)}.ground{fill:var(--ground)}
.prior{fill:none;stroke:var(--faint);stroke-width:1.2;stroke-dasharray:4 4}
.dots{fill:none;stroke:currentColor;stroke-width:3.4;stroke-linecap:round;stroke-opacity:.5}
img{display:block;max-width:100%;height:auto;background:#fff;border-radius:6px}
figure.wide{margin:.8rem 0}
.scroll{overflow-x:auto;margin:.6rem 0 .9rem}
table{border-collapse:collapse;font-size:.9rem;line-height:1.4}
th{color:var(--soft);font-weight:500;text-align:left;font-size:.83rem}
th,td{padding:.3rem 1.1rem .3rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;overflow-wrap:normal;white-space:nowrap}
table.mono td,code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.82rem}
table.full{width:100%}table.first-short td:not(:last-child){white-space:nowrap}table.full.mono td:first-child{width:2.2rem}
dl{margin:.6rem 0;font-size:.92rem}
section dl>div{display:grid;grid-template-columns:11rem 1fr;gap:1rem;padding:.28rem 0;border-bottom:1px solid var(--rule)}
section dl>div:last-child{border-bottom:0}
section dt{color:var(--soft)}section dd{margin:0;max-width:48rem}
.code{background:var(--ground);border-radius:6px;padding:.6rem .8rem;max-width:none;font-family:ui-monospace,SFMono-Regular,Menlo,
Consolas,"DejaVu Sans Mono",monospace;font-size:.82rem}
details{margin:.7rem 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
footer{margin-top:3rem;padding-top:.7rem;border-top:1px solid var(--rule);color:var(--soft);font-size:.85rem}
@media (max-width:60rem){.six{grid-template-columns:repeat(3,1fr)}}
@media (max-width:34rem){html{font-size:15px}main{padding:1.1rem .9rem 3rem}.six{grid-template-columns:repeat(2,1fr)}
svg text,svg .label{font-size:16px}
.six dd{font-size:1.3rem}section dl>div{grid-template-columns:1fr;gap:0}th,td{padding-right:.75rem}}
@media print{html{font-size:10.5pt}main{max-width:none;padding:0}section{break-inside:auto;margin-top:1.4rem}
figure,tr,.six,.verdict{break-inside:avoid}h2{break-after:avoid}.grid-of-figures{grid-template-columns:1fr 1fr;gap:.8rem 1.4rem}
.scroll{overflow:visible}details::details-content{content-visibility:visible;height:auto}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
@page{margin:15mm}}
"""
