"""Draws all figures of the page."""
from report import figures_gemms, figures_loss, figures_speed, figures_step


def draw_all(found, names, comparisons, data, price):
    """Returns (drawings, {part: tables}, words on what is left out). data: the numbers of report.json."""
    drawings, left_out = figures_loss.draw(found.runs, names, comparisons, price)
    speed, why = figures_speed.draw(data, found)
    step, tables, why_step = figures_step.draw(found.runs, names)
    gemms, gemm_tables, why_gemms = figures_gemms.draw(found.runs, names)
    return drawings + speed + step + gemms, {**tables, **gemm_tables}, left_out + why + why_step + why_gemms
