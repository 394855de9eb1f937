"""What README.md shows of a report: some of its rows, or one line for each thing that one may want to know."""

from benchmarks.tables import Report, markdown, provenance, rows_at


def step_in_short(report: Report) -> str:
    return f"{provenance(report)}\n\n{markdown(report['recipes']['rows'])}\n"


def results_in_short(report: Report) -> str:
    """Of each data set what a model is worth, and whether its latent is used."""
    latents = {row["set"]: row for row in rows_at(report, "sets.latent")}
    rows = [
        {
            "set": row["set"],
            "NLL, nats a sequence": row["IW-NLL a sequence"],
            "without a latent": row["without a latent"],
            **{name: latents[row["set"]][name] for name in ("mutual information (cap)", "decoder use")},
        }
        for row in rows_at(report, "sets.likelihood")
    ]
    return f"{provenance(report)}\n\n{markdown(rows)}\n"


def loading_in_short(report: Report) -> str:
    """The README's part: one line for each thing that one may want to know."""
    gather, plans = report["gather"], report["plan"]
    lines = {
        "random batches of 64 from one file, real tokens/s": (
            f"{report['against_hf']['ratio']} x HF datasets in its fastest form, the same rows"
        ),
        f"gathering batches of {gather['tokens a batch']:,} tokens": f"{gather['M real tokens/s']} M real tokens/s",
    }
    for build in report["build"]:
        lines[f"building the cache, {build['data']}"] = (
            f"{build['seconds']:.1f} s ({build['M items/s']} M a second), with a peak of {build['peak MB']:,} MB"
        )
    largest = max(report["build"], key=lambda build: build["M items"])
    lines[f"a second start, {largest['data']}"] = f"{largest['second start s']:.2f} s"
    (million,) = (plan for plan in plans if (plan["sequences"], plan["tokens a batch"]) == (1_000_000, 4096))
    lines["plan of an epoch, 10^6 sequences"] = f"{million['ms']} ms"
    lines["padding efficiency, 10^6 log-normal lengths (mean 75), 4,096 tokens a batch"] = (
        f"{million['padding efficiency']:.3f}"
    )
    thread, process = (
        max(row["MB a worker"] for row in report["worker_memory"] if row["worker_type"] == kind and row["workers"])
        for kind in ("thread", "process")
    )
    lines["memory of a worker thread; of a worker process"] = f"{thread} MB; {process} MB"
    table = "\n".join(f"| {name} | {value} |" for name, value in lines.items())
    return f"{provenance(report)}\n\n| | |\n|---|---|\n{table}\n"
