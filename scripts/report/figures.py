"""Draws all figures of the page."""
from report import figures_gemms, figures_loss, figures_numerics, figures_speed, figures_step


def draw_all(found, names, comparisons, data, price):
    """Returns (drawings, {part: tables}, words on what is left out). data: the numbers of report.json."""
    runs = sorted(found.runs, key=lambda run: -run.num_steps)  # figures of one run of each kind show the longest
    drawings, left_out = figures_loss.draw(found.runs, names, comparisons, price, data["margin_percent"])
    numerics, why_numerics = figures_numerics.draw(runs, names, comparisons)
    speed, why = figures_speed.draw(data, found)
    step, tables, why_step = figures_step.draw(runs, names)
    gemms, gemm_tables, why_gemms = figures_gemms.draw(runs, names)
    return (drawings + numerics + speed + step + gemms, {**tables, **gemm_tables},
            left_out + why_numerics + why + why_step + why_gemms)
