"""The rows of the README."""

from __future__ import annotations

from benchmarks.pages.tables import NONE, Results, both, markdown

Triple = tuple[str, str, str]


def glance(results: Results) -> str:
    """Question, ours, baseline."""
    rows = [
        perturbations(results),
        autoattack(results),
        proofs(results),
        verdicts(results),
        sdp(results),
        omega(results),
        wine(results),
    ]
    columns = [
        ("question", lambda row: row["q"]),
        ("wassail", lambda row: row["w"]),
        ("baseline", lambda row: row["b"]),
    ]
    return markdown(columns, [{"q": q, "w": w, "b": b} for q, w, b in rows])


def perturbations(results: Results) -> Triple:
    """Mean distances against the best attack of adversarial-library."""
    question = "minimal perturbations: mean distance, 1,000 images"
    rows = [row for row in results.table("attacks", "minimal") if "best_peer" in row]
    if not rows:
        return question, NONE, NONE
    below = sum(row["mean_1000"] <= row["best_peer_mean"] for row in rows)
    few = sum(row["mean_300"] <= row["best_peer_mean"] for row in rows if "mean_300" in row)
    ratios = sorted(row["mean_1000"] / row["best_peer_mean"] for row in rows)
    attacks = sorted({attack for row in rows for attack in row["peers"]})
    return (
        question,
        f"at or below the best of them in {below} of {len(rows)} cases with 1,000 passes, in {few} "
        f"with 300; ratio {ratios[0]:.3f} to {ratios[-1]:.3f}",
        f"{', '.join(attacks)} of adversarial-library at about 1,000 passes",
    )


def autoattack(results: Results) -> Triple:
    """Accuracy and time of AutoAttack."""
    question = "AutoAttack's robust accuracy, `cifar_cnn_a_adv`, linf 2/255"
    row = results.row("autoattack", "suite", "cifar_cnn_a_adv-linf")
    if row is None:
        return question, NONE, NONE
    question += f", {row['images']:,} images"
    ours = f"{row['ours']['percent']:.1f} %"
    if "theirs" in row:
        ours += f" in {row['ours_seconds'] / row['theirs_seconds']:.2f} of its processor time"
    theirs = (
        f"{row['theirs']['percent']:.1f} % by its authors' program" if "theirs" in row else NONE
    )
    return question, ours, theirs


def proofs(results: Results) -> Triple:
    """Proofs of competition instances."""
    question = "VNN-COMP: instances proved"
    row = results.row("vnncomp", "networks", "all")
    if row is None:
        return question, NONE, NONE
    sets = [r["set"].split("/", 1)[1] for r in results.table("vnncomp", "networks")[:-1]]
    question += f" ({', '.join(sets)})"
    return (
        question,
        f"{row['proved']} of {row['instances']} in {row['limit']:g} s of one CPU thread each, "
        f"{row['contradictions']} contradictions",
        f"{row['winner_proved']} by alpha-beta-CROWN in the competition, on a GPU",
    )


def verdicts(results: Results) -> Triple:
    """Sets of VNN-LIB properties."""
    question = "VNN-LIB: instances decided, ten sets of VNN-COMP 2025"
    row = results.row("vnnlib", "sets", "all")
    if row is None:
        return question, NONE, NONE
    return (
        question,
        f"{row['decided']:,} of {row['run']:,} in at most {row['limit']:g} s of one CPU thread "
        f"each, {row['contradictions']} contradictions; {row['absent']} more have no public copy",
        f"{row['public']:,} by alpha-beta-CROWN, or else two other tools, in the competition",
    )


def sdp(results: Results) -> Triple:
    """Verified accuracy on the networks of SDP-CROWN."""
    question = "verified accuracy at l2, networks of SDP-CROWN"
    rows = results.table("certificates", "sdp")
    if not rows:
        return question, NONE, NONE
    question += f" ({', '.join(row['network'].removeprefix('sdp_') for row in rows)})"
    ours = ", ".join(f"{row['verified']['percent']:.1f}" for row in rows)
    counts = ", ".join(str(row["images"]) for row in rows)
    theirs = ", ".join(f"{row['published']['sdp_crown']:g}" for row in rows)
    return (
        question,
        f"{ours} % of {counts} images on one CPU thread",
        f"{theirs} % of 200 published, on a GPU",
    )


def omega(results: Results) -> Triple:
    """Both sides over Omega_1."""
    question = "accuracy over Omega_1 at half the eps of the training, certified..attacked"
    rows = results.table("gaps", "brackets")[:3]
    if not rows:
        return question, NONE, NONE
    cells = [
        f"`{row['network']}` {row['norm']} {row['eps']} / 2, {row['images']} images: "
        f"{both(row['certified_half'], row['attacked_half'])} %"
        for row in rows
    ]
    return question, "; ".join(cells), "no other tool bounds it from both sides"


def wine(results: Results) -> Triple:
    """The constant that was open."""
    question = "exact l2 Lipschitz constant of wine 11-24-24-1"
    row = results.row("lipschitz", "space", "exlipbab_wine_11-24-24-1")
    if row is None:
        return question, NONE, NONE
    value = f"{row['upper']:.10g}" if row["exact"] else f"{row['lower']:.6g} to {row['upper']:.6g}"
    return question, f"{value} in {row['seconds']:.0f} s", f"ExLipBaB: {row['published']}"
