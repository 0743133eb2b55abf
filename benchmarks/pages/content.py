"""The pages of docs/results, one function each."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.networks.fetch import address_of
from benchmarks.networks.files import NETWORKS
from benchmarks.pages.summary import index, source
from benchmarks.pages.tables import (
    NONE,
    Cell,
    Results,
    Row,
    both,
    ceil,
    code,
    field,
    floor,
    limits,
    markdown,
    threat,
)

GENERATED = "<!-- Written by `python -m benchmarks.pages` from results/*.json: do not edit. -->\n\n"


def attacks(results: Results) -> str:
    """Minimal perturbations and AutoAttack."""
    rows = results.table("attacks", "minimal")
    text = (
        "# Attacks\n\n## Minimal perturbations\n\n"
        "The mean distance of the nearest adversarial example over the images that the network "
        "gets right: smaller is better. First 1,000 test images, box [0, 1]; settings were chosen "
        "on images from 1,000 on. `nearest` with 100, 300 and 1,000 passes (forward plus backward) "
        "an image; the attacks of adversarial-library with about 1,000. *Best peer*: the single "
        "attack with the smallest mean among those that find an example for every image. *Union*: "
        "the nearest example of all of them. Every example was evaluated again.\n\n"
    )
    if rows:
        columns = [
            ("network", code("network")),
            ("norm", field("norm")),
            ("images", field("images", "d")),
            ("100 passes", field("mean_100", ".5g")),
            ("300", field("mean_300", ".5g")),
            ("1,000", field("mean_1000", ".5g")),
            ("best peer", lambda r: peer(r)),
            ("1,000 / best peer", lambda r: ratio(r, "best_peer_mean")),
            ("1,000 / union", lambda r: ratio(r, "union")),
        ]
        text += markdown(columns, rows)
        text += (
            "\nAccuracy over Omega_1 and Omega_2 that these examples leave, in %; the union of the "
            "peers beside it.\n\n"
        )
        columns = [
            ("network", code("network")),
            ("threat", threat),
            ("clean", field("clean", ".1f")),
            ("Omega_1, 1,000 passes", field("omega1_1000", ".2f")),
            ("peers' union", field("union_omega1", ".2f")),
            ("Omega_2, 1,000 passes", field("omega2_1000", ".2f")),
            ("peers' union", field("union_omega2", ".2f")),
        ]
        text += markdown(columns, rows)
        text += "\nThe attacks of the peers one by one, 1,000 images each.\n\n"
        single = [
            {"network": r["network"], "norm": r["norm"], "attack": name} | peer_row
            for r in rows
            for name, peer_row in r["peers"].items()
        ]
        columns = [
            ("network", code("network")),
            ("norm", field("norm")),
            ("attack", field("attack")),
            ("passes", field("passes", ".0f")),
            ("found, %", field("flipped", ".1f")),
            ("mean distance of those", field("mean", ".5g")),
            ("processor s", field("seconds", ".0f")),
        ]
        text += markdown(columns, single)
    suite = results.table("autoattack", "suite")
    if suite:
        text += (
            "\n## AutoAttack\n\n"
            "The standard version (APGD-CE, APGD-T, FAB-T, Square), `ws.autoattack` beside its "
            "authors' program: robust accuracy in %, with 95 % confidence limits for images drawn "
            "like these. Processor seconds of both, by turns in one process.\n\n"
        )
        columns = [
            ("network", code("network")),
            ("threat", threat),
            ("images", field("images", "d")),
            ("ours", lambda r: limits(r["ours"])),
            ("authors' program", lambda r: limits(r["theirs"]) if "theirs" in r else NONE),
            ("seconds, ours / theirs", timing),
            ("ratio", time_ratio),
        ]
        text += markdown(columns, suite)
    return text


def peer(row: Row) -> str:
    if "best_peer" not in row:
        return "not run"
    return f"{row['best_peer_mean']:.5g} ({row['best_peer']})"


def ratio(row: Row, name: str) -> str:
    return f"{row['mean_1000'] / row[name]:.3f}" if row.get(name) else NONE


def time_ratio(row: Row) -> str:
    return f"{row['ours_seconds'] / row['theirs_seconds']:.2f}" if "theirs" in row else NONE


def timing(row: Row) -> str:
    theirs = f"{row['theirs_seconds']:.0f}" if "theirs" in row else NONE
    return f"{row['ours_seconds']:.0f} / {theirs}"


def certificates(results: Results) -> str:
    """Verified accuracy, brackets, competition instances."""
    text = (
        "# Certificates\n\n## Networks of SDP-CROWN\n\n"
        "Verified accuracy at l2 in %, by `ws.verify` with its defaults on one CPU thread, sound "
        "for the network as it is executed in float32. Its authors' 200 images and published "
        "figures (ICML 2025, on a GPU). In brackets 95 % confidence limits for images drawn like "
        "these. Some constants of the l2 bounds were chosen while looking at a few of these "
        "images.\n\n"
    )
    rows = results.table("certificates", "sdp")
    columns = [
        ("network", code("network")),
        ("threat", threat),
        ("images", field("images", "d")),
        ("clean", lambda r: f"{r['clean']['percent']:.1f}"),
        ("verified", lambda r: f"**{limits(r['verified'])}**"),
        ("attacked", lambda r: f"{r['attacked']['percent']:.1f}"),
        ("open images", field("open", "d")),
        ("s an image", field("seconds", ".2f")),
        ("SDP-CROWN", lambda r: f"{r['published']['sdp_crown']:g}"),
        ("BICCOS", lambda r: f"{r['published']['biccos']:g}"),
        ("layer norms", lambda r: f"{r['published']['product']:g}"),
        ("attack, published", lambda r: f"{r['published']['attack']:g}"),
    ]
    text += markdown(columns, rows) if rows else ""
    others = results.table("certificates", "others")
    if others:
        text += "\n## Other networks\n\nThe same call on public networks, first test images.\n\n"
        text += markdown(columns[:8], others)
    brackets = results.table("gaps", "brackets")
    if brackets:
        text += (
            "\n## Accuracy over Wasserstein balls, from both sides\n\n"
            f"`ws.sandwich` with effort {brackets[0]['effort']:g} (seconds of one core an image, "
            "roughly): at least the first figure under every distribution of the set, at most the "
            "second, for a distribution that was built and verified. Certified rounded down, "
            "attacked up.\n\n"
        )
        columns = [
            ("network", code("network")),
            ("threat", threat),
            ("images", field("images", "d")),
            ("clean", field("clean", ".1f")),
            ("Omega_1", lambda r: both(r["certified_1"], r["attacked_1"])),
            ("Omega_2", lambda r: both(r["certified_2"], r["attacked_2"])),
            ("Omega_inf", lambda r: both(r["certified_inf"], r["attacked_inf"])),
            ("s an image", field("seconds", ".1f")),
        ]
        text += markdown(columns, brackets)
    instances = results.table("vnncomp", "networks")
    if instances:
        text += (
            "\n## VNN-COMP 2021 and 2022\n\n"
            "Does a network give one label everywhere in a box? `ws.verify` with its defaults, in "
            f"float64 and about exact arithmetic, {instances[0]['limit']:g} processor seconds of "
            "one thread an instance. The public verdict is alpha-beta-CROWN's (it won both years, "
            "on a GPU), else that of at least two tools with none against them. *Contradictions*: "
            "ours against the public verdict. The first 10 instances of each network.\n\n"
        )
        columns = [
            ("set, network", field("set")),
            ("instances", field("instances", "d")),
            ("proved", field("proved", "d")),
            ("public: proved", field("public_proved", "d")),
            ("alpha-beta-CROWN: proved", field("winner_proved", "d")),
            ("falsified", field("falsified", "d")),
            ("public: falsified", field("public_refuted", "d")),
            ("contradictions", field("contradictions", "d")),
            ("s an instance", field("seconds", ".1f")),
        ]
        text += markdown(columns, instances)
    return text


def lipschitz(results: Results) -> str:
    """Exact constants."""
    text = (
        "# Lipschitz constants\n\n## On all of space\n\n"
        'The largest l2 norm of the Jacobian, by `ws.lipschitz(method="exact")`, beside ExLipBaB '
        "(arXiv 2602.15499). Wine 11-24-24-1 was open: ExLipBaB stopped after 12 hours.\n\n"
    )
    columns = [
        ("network", code("network")),
        ("ours", constant),
        ("s", field("seconds", ".1f")),
        ("ExLipBaB", field("published")),
        ("its nodes", field("nodes", ",")),
    ]
    text += markdown(columns, results.table("lipschitz", "space"))
    boxes = results.table("lipschitz", "boxes")
    if boxes:
        text += (
            "\n## On boxes\n\nThe same norm in and out, on [0, 1] or [0, 0.1] in every input, "
            "beside LipBaB's published constants (arXiv 2105.05495).\n\n"
        )
        columns = [
            ("network", code("network")),
            ("box", lambda r: f"[0, {r['high']:g}]"),
            ("norm", field("norm")),
            ("ours", constant),
            ("s", field("seconds", ".1f")),
            ("LipBaB", field("published", ".12g")),
            ("relative difference", field("difference", ".0e")),
        ]
        text += markdown(columns, boxes)
    slopes = results.table("lipschitz", "slopes")
    if slopes:
        text += (
            "\n## The paper's constant beside the margin slope\n\n"
            "On all of space, each from both sides: the paper's `L` bounds how fast the worst-case "
            "loss grows, and the margin slope `Lm` does so with less.\n\n"
        )
        columns = [
            ("network", code("network")),
            ("norm", field("norm")),
            ("Lm", lambda r: "{:.5g} to {:.5g}".format(*r["margin"])),
            ("L", lambda r: "{:.5g} to {:.5g}".format(*r["paper"])),
            ("L / Lm, lower", lambda r: f"{r['paper'][0] / r['margin'][0]:.2f}"),
            ("upper", lambda r: f"{r['paper'][1] / r['margin'][1]:.2f}"),
        ]
        text += markdown(columns, slopes)
    return text


def constant(row: Row) -> str:
    if row["exact"]:
        return f"{row['upper']:.12g}, exact"
    return f"{row['lower']:.9g} to {row['upper']:.9g}"


def smoothing(results: Results) -> str:
    """Votes under noise."""
    text = (
        "# Smoothing\n\nCertificates for a network under Gaussian noise at l2, on all of space, "
        "confidence 99.9 %. The *vote* answers with the class that has more than half of the "
        "probability under the noise; the *random* classifier with the class of one draw. Accuracy "
        "in %, certified..attacked. *Kumar*: the bound of Kumar, Levine and Feizi (2022) for the "
        "random classifier, from the same draws.\n"
    )
    for row in results.table("smoothing", "votes"):
        text += (
            f"\n## {row['network']}\n\nsigma {row['sigma']:g}, {row['images']} images, "
            f"{row['draws']} draws each, {row['seconds']:.2f} processor seconds an image. For all "
            "inputs of this kind, not only these, the random classifier keeps at least "
            f"{floor(row['population'])} % over Omega_1(0.05) (confidence 95 %).\n\n"
        )
        columns = [
            ("eps", field("eps", "g")),
            ("vote, Omega_1", lambda r: both(*r["vote"])),
            ("random, Omega_1", lambda r: both(*r["random_1"])),
            ("Kumar", lambda r: floor(r["kumar"])),
            ("random, Omega_2", lambda r: both(*r["random_2"])),
            ("random, Omega_inf", lambda r: both(*r["random_inf"])),
        ]
        text += markdown(columns, row["budgets"])
    return text


def training(results: Results) -> str:
    """Trainings on digits."""
    rows = results.table("training", "trainings")
    built_in = results.table("training", "built_in")
    one = (rows + built_in)[0]
    text = (
        f"# Training\n\nDigits, linf, Omega_1({one['eps']:g}): a network of two convolutions, "
        "trained from the same weights with the same number of forward and backward passes. "
        f"Accuracy in % on {one['images']} images that no training saw; certified by CROWN radii, "
        "attacked by `nearest`. The mean over the seeds, and their range. Radius or budget: the "
        "better of two on training images.\n\n"
    )
    if rows:
        columns = [
            ("training", field("training")),
            ("radius or budget", field("setting", "g")),
            ("seeds", field("seeds", "d")),
            *[(side, spread(side)) for side in ("clean", "certified", "attacked")],
            ("s", field("seconds", ".0f")),
        ]
        text += markdown(columns, rows)
    if built_in:
        text += "\n## Networks that come with the package\n\n"
        columns = [
            ("network", code("network")),
            ("clean", field("clean", ".1f")),
            ("Omega_1", lambda r: both(r["certified"], r["attacked"])),
        ]
        text += markdown(columns, built_in)
    return text


def spread(side: str) -> Callable[[Row], str]:
    return lambda r: "{:.1f} ({:.1f} to {:.1f})".format(r[side], *r[f"{side}_range"])


def corruptions(results: Results) -> str:
    """Known shifts."""
    text = (
        "# Corruptions and other known shifts\n\nThe eps of a shift is the mean distance that it "
        "moves the images: an upper bound on the Wasserstein distance of order 1. *Accuracy*: "
        "under the shift, in %. *Attacked at this eps*: what an attack leaves over Omega_1 at the "
        "eps of the shift. At linf even a weak corruption has an eps at which attacks leave "
        "nothing: there Omega_1 does not speak about corruptions; choose l2, or order inf, or "
        "name the shift.\n"
    )
    for row in results.table("corruptions", "shifts"):
        text += (
            f"\n## {row['network']}, {row['norm']}\n\n{row['images']} images, clean "
            f"{row['clean']:.1f} %. The least eps is {row['least']['eps']['1']:.3g} "
            f"(`{row['least']['name']}`). At eps {row['eps']} attacks leave "
            f"{row['attacked']['1']:.1f} % over Omega_1 and {row['attacked']['inf']:.1f} % over "
            "Omega_inf.\n\n"
        )
        columns = [
            ("shift", field("name")),
            ("accuracy", field("accuracy", ".1f")),
            ("eps, order 1", lambda r: f"{r['eps']['1']:.3g}"),
            ("order 2", lambda r: f"{r['eps']['2']:.3g}"),
            ("order inf", lambda r: f"{r['eps']['inf']:.3g}"),
            ("attacked at this eps", lambda r: ceil(r["attacked"])),
        ]
        text += markdown(columns, row["shifts"])
    return text


def scale(results: Results) -> str:
    """Costs of a run."""
    rows = results.table("scale", "evaluate")
    text = (
        "# Scale\n\nA whole `ws.evaluate` (clean accuracy, checks, `nearest`, curves of three "
        f"orders) of `{rows[0]['network']}` on CIFAR-10, {rows[0]['passes']} passes an image, one "
        "thread. Memory: the most that the process held, with PyTorch, network and data, and "
        "before the evaluation began.\n\n"
    )
    columns = [
        ("images", field("samples", ",")),
        ("processor s", field("seconds", ".1f")),
        ("ms an image", field("each", ".1f")),
        ("memory, MB", field("after", ".0f")),
        ("before", field("before", ".0f")),
    ]
    return text + markdown(columns, rows)


def board(results: Results) -> str:
    """The board."""
    rows = results.table("board", "board")
    proved = sum(row["certified_images"] > 0 for row in rows)
    text = (
        "# Board\n\nPublic networks over Wasserstein balls of order 1, 2 and inf, in the norm and "
        f"at the eps they were trained for or are known for. **{len(rows)} networks, {proved} "
        "certified.** Accuracy in %. *Attacked*: `nearest` with 100 passes on the first images. "
        "*Certified..attacked*: on the first images of those, by linear bounds (CROWN radii): at "
        "least the first figure under every distribution of the set, at most the second. "
        "Certificates of networks without them take minutes an image here. The same figures as "
        "data: [board.json](board.json).\n"
    )
    for norm in ("linf", "l2", "l1"):
        mine = [row for row in rows if row["norm"] == norm]
        if not mine:
            continue
        columns = [
            ("network", code("network")),
            ("data", field("data")),
            ("eps", field("eps")),
            ("images", field("images", "d")),
            ("clean", field("clean", ".1f")),
            ("attacked: Omega_1", lambda r: ceil(r["attacked_1"])),
            ("Omega_2", lambda r: ceil(r["attacked_2"])),
            ("Omega_inf", lambda r: ceil(r["attacked_inf"])),
            ("images certified", field("certified_images", "d")),
            ("certified..attacked: Omega_1", lambda r: pair(r, "1")),
            ("Omega_2", lambda r: pair(r, "2")),
            ("Omega_inf", lambda r: pair(r, "inf")),
        ]
        text += f"\n## {norm}\n\n"
        text += markdown(columns, sorted(mine, key=lambda row: -row["attacked_1"]))
    return text


def pair(row: Row, order: str) -> str:
    return both(*row[f"both_{order}"]) if row["certified_images"] else NONE


def feed(results: Results) -> str:
    """The board as data."""
    record = results.stages["board"]
    entries = ",\n".join(json.dumps(row) for row in results.table("board", "board"))
    head = json.dumps({"commit": record["commit"], "command": record["command"]})[1:-1]
    return f'{{{head}, "networks": [\n{entries}\n]}}\n'


def networks(results: Results) -> str:
    """Sources of networks and data."""
    text = (
        "# Networks and data\n\nEverything that the tables are measured on: public file, licence, "
        "architecture, how inputs in [0, 1] are scaled inside the network, SHA-256 of the content. "
        "`python -m benchmarks.networks fetch` downloads, checks and builds them (`list` says what "
        "is here). The digits networks and data come with the package.\n\n"
    )
    columns = [
        ("name", lambda r: f"`{r['e'].name}`"),
        ("data", lambda r: r["e"].data or NONE),
        ("source", lambda r: origin(r["e"])),
        ("licence", lambda r: r["e"].licence),
        ("architecture", lambda r: r["e"].architecture or NONE),
        ("mean; std", lambda r: scaling(r["e"])),
        ("SHA-256", lambda r: f"`{r['e'].sha256[:16]}`"),
    ]
    parts = (
        ("Networks", ("network", "onnx")),
        ("Small networks with known Lipschitz constants", ("layers",)),
        ("Data", ("data",)),
    )
    for title, kinds in parts:
        rows = [{"e": entry} for entry in NETWORKS.values() if entry.kind in kinds]
        text += f"## {title}\n\n" + markdown(columns, rows) + "\n"
    return text.rstrip("\n") + "\n"


def origin(entry: object) -> str:
    sources = entry.sources  # type: ignore[attr-defined]
    about = entry.about  # type: ignore[attr-defined]
    if not sources:
        return about or NONE
    first = sources[0]
    if "repository" in first:
        path = first["path"].replace("|", "\\|")
        return f"{first['repository']}, `{path}`" + (f". {about}" if about else "")
    return address_of(first) + (f". {about}" if about else "")


def scaling(entry: object) -> str:
    mean, std = entry.mean, entry.std  # type: ignore[attr-defined]
    if not mean:
        return NONE
    return "{}; {}".format(*(" ".join(f"{v:.4g}" for v in values) for values in (mean, std)))


def vnnlib(results: Results) -> str:
    """Sets of 2025."""
    rows = results.table("vnnlib", "sets")
    text = (
        "# VNN-LIB: sets of VNN-COMP 2025\n\n`wassail vnnlib` "
        "([how to use it](../howto/onnx-and-vnnlib.md)) on public sets that fit a CPU. One thread, "
        "at most "
        f"the competition's own seconds or {rows[0]['limit']:g}, in processor seconds; a network "
        "is read once for instances that follow each other. *Absent*: the network is not in the "
        "copy of the sets at hand. The public verdict is alpha-beta-CROWN's, else that of at least "
        "two tools with none against them. *Contradictions*: ours against the public verdict. "
        "Every sat was evaluated in float64, in float32 and by onnxruntime.\n\n"
    )
    columns = [
        ("set", field("set")),
        ("instances", field("instances", "d")),
        ("absent", field("absent", "d")),
        ("run", field("run", "d")),
        ("decided", field("decided", "d")),
        ("unsat", field("unsat", "d")),
        ("sat", field("sat", "d")),
        ("public: decided of those run", field("public", "d")),
        ("contradictions", field("contradictions", "d")),
        ("s, median of decided", field("median", ".2f")),
    ]
    text += markdown(columns, rows)
    others = results.table("vnnlib", "peers")
    if others:
        columns = [
            ("tool", field("tool")),
            ("set", field("set")),
            ("instances", field("instances", "d")),
            ("it decides", field("decided", "d")),
            ("ours", field("ours", "d")),
            ("contradictions", field("contradictions", "d")),
            ("its s, median", field("median", ".2f")),
            ("our s, median", field("our_median", ".2f")),
        ]
        text += (
            "\n## Other tools on this processor\n\nInstances spread evenly over the list, 20 "
            "processor seconds each, one process and one thread. Medians are over instances that "
            "both decide; theirs include the start of the tool, which takes 1 to 6 seconds, ours "
            "do not. alpha-beta-CROWN ran without a GPU, for which it is made.\n\n"
        )
        text += markdown(columns, others)
    return text


def distributions(results: Results) -> str:
    """Properties of distributions."""
    rows = results.table("distributions", "properties")
    text = (
        "# Properties of distributions\n\n`wassail omega` "
        f"([how to use it](../howto/omega.md)) on properties of public networks, "
        f"{rows[0]['samples']} samples each, decided with the default effort. Every answer was "
        "checked: plans in every arithmetic, radii proved again. Processor seconds without the "
        "check.\n\n"
    )
    columns = [
        ("network", code("network")),
        ("threat", field("threat")),
        ("claim", field("claim")),
        ("answer", field("answer")),
        ("worst case, between", lambda r: f"{r['low']:.4f} and {r['high']:.4f}"),
        ("s", field("seconds", ".1f")),
        ("check", field("check")),
    ]
    return text + markdown(columns, rows)


def population(results: Results) -> str:
    """How often limits for the population hold."""
    rows = results.table("coverage", "limits")
    text = (
        "# Limits for the population\n\nIs a limit with 95 % confidence right 95 times in 100? "
        "1,000 data sets are drawn from a population whose curve is known, and each side of each "
        "limit is compared with it. *Band*: the limits for all eps at once, compared at six eps. "
        "*One threat*: for one eps. Shares of data sets in which a side holds, in %, with 95 % "
        "confidence limits; a share of less than 95 beyond these would be a mistake. *Width*: mean "
        "distance of both sides at one eps, in points. What it means: "
        "[from samples to the population](../explanation/population-guarantee.md).\n\n"
    )
    columns = [
        ("shift", field("shift")),
        ("order", field("order")),
        ("samples", field("samples", ",")),
        ("band: certified", lambda r: limits(r["band"]["certified"])),
        ("attacked", lambda r: limits(r["band"]["attacked"])),
        ("width", lambda r: f"{r['band']['width']:.1f}"),
        ("one threat: certified", lambda r: limits(r["threat"]["certified"])),
        ("attacked", lambda r: limits(r["threat"]["attacked"])),
        ("width", lambda r: f"{r['threat']['width']:.1f}"),
    ]
    return text + markdown(columns, rows)


def defaults(results: Results) -> str:
    """The default beside the methods that it is made of."""
    text = (
        "# The default beside its methods\n\n"
        "`auto` is what a call without options takes; the other columns are its parts, asked for "
        "by name. One run, one CPU thread. *Ratio*: what `auto` found to what the best part found, "
        "*time* likewise: 1 and 1 would be that part itself.\n"
    )
    for asked, unit, form in (("radii", "mean radius", ".4g"), ("verify", "images proved", ".0f")):
        rows = results.table("methods", asked)
        if not rows:
            continue
        parts = sorted({part for row in rows for part in row["found"]} - {"auto"})
        columns = [("network", code("network")), ("threat", threat), ("right", field("right", "d"))]
        columns += [(part, found_by(part, form)) for part in ("auto", *parts)]
        columns += [("best part", field("best")), ("ratio", field("ratio", ".3f"))]
        columns += [("time", field("time", ".2f"))]
        text += (
            f"\n## `{asked}`: {unit}, s an image\n\n"
            f"The first {rows[0]['images']} images of each network, and of these those that are "
            "classified right.\n\n"
        )
        text += markdown(columns, rows)
    return text


def found_by(part: str, form: str) -> Cell:
    """What a method found, and the seconds that it took."""

    def cell(row: Row) -> str:
        if part not in row["found"]:
            return NONE
        return f"{row['found'][part]:{form}} ({row['seconds'][part]:.2g} s)"

    return cell


def regression(results: Results) -> str:
    """Accuracy within a tolerance, and the mean absolute error."""
    rows = results.table("regression", "regression")
    text = (
        "# Regression\n\n"
        f"Networks of ExLipBaB on their tables, {rows[0]['samples']} samples; features in units of "
        "their standard deviations, the domain is the range of each feature. *Within*: accuracy "
        "within a tolerance of each sample, at least..at most over the ball, by `ws.sandwich`. "
        "*Error*: the worst mean absolute error, from both sides, by `ws.loss_curve`.\n\n"
    )
    columns = [
        ("network", code("network")),
        ("norm", field("norm")),
        ("order", field("order")),
        ("eps", field("eps", "g")),
        ("within, %", lambda r: both(r["within_low"], r["within_high"])),
        ("s", field("seconds", ".1f")),
        ("error", lambda r: f"{r['error_low']:.4f}..{r['error_high']:.4f}"),
        ("gap, %", field("error_gap", ".2f")),
        ("s, all orders and eps", field("error_seconds", ".0f")),
    ]
    return text + markdown(columns, rows)


# page -> the stages of which at least one is needed, and who writes it
PAGES: dict[str, tuple[tuple[str, ...], Callable[[Results], str]]] = {
    "attacks": (("attacks", "autoattack"), attacks),
    "certificates": (("certificates", "gaps", "vnncomp"), certificates),
    "defaults": (("methods",), defaults),
    "lipschitz": (("lipschitz",), lipschitz),
    "smoothing": (("smoothing",), smoothing),
    "training": (("training",), training),
    "corruptions": (("corruptions",), corruptions),
    "scale": (("scale",), scale),
    "board": (("board",), board),
    "networks": ((), networks),
    "vnnlib": (("vnnlib",), vnnlib),
    "distributions": (("distributions",), distributions),
    "population": (("coverage",), population),
    "regression": (("regression",), regression),
}
ABOUT = {
    "attacks": "minimal perturbations and AutoAttack beside other tools",
    "certificates": "verified accuracy, both sides over Wasserstein balls, VNN-COMP",
    "defaults": "the default of `radii` and `verify` beside each of its methods alone",
    "lipschitz": "exact Lipschitz constants",
    "smoothing": "certificates under Gaussian noise",
    "training": "training for Omega_1",
    "corruptions": "the eps of known shifts",
    "scale": "seconds and memory against the number of images",
    "board": "public networks over Wasserstein balls",
    "networks": "sources, licences and checksums of networks and data",
    "vnnlib": "sets of VNN-COMP 2025",
    "distributions": "properties of distributions, decided and checked",
    "population": "how often limits for the population hold, by simulation",
    "regression": "accuracy within a tolerance and mean absolute error of regressions",
}


def pages(results: Results) -> dict[str, str]:
    """Every page that there are figures for, by its file below docs/results."""
    found = {}
    for name, (stages, write) in PAGES.items():
        if not stages or any(stage in results.stages for stage in stages):
            found[f"{name}.md"] = GENERATED + write(results) + source(results, stages)
    if "board" in results.stages:
        found["board.json"] = feed(results)
    there = {name: ABOUT[name] for name in PAGES if f"{name}.md" in found}
    found["index.md"] = GENERATED + index(results, there)
    return found
