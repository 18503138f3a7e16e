#!/usr/bin/env bash
# scripts/report.sh FOLDER: the table of a sweep (scripts/sweep.sh, which calls this at its end), printed, and written to FOLDER/table.txt,
# table.csv (every digit and more columns) and table.md. Numbers are those of the summary at the end of each run's log.jsonl.
set -u
[ $# -eq 1 ] && [ -f "$1/runs.txt" ] || { echo "usage: scripts/report.sh FOLDER, the --out folder of scripts/sweep.sh" >&2; exit 1; }
cd "$1" || exit 1

# One line a run, fields parted by tabs: model, T, precision, GPUs, kind of result, seconds, message, settings line, summary line.
collect() {
    local name length gpus precision model kind seconds message
    while read -r name length gpus precision model; do
        kind="not run" seconds=0 message=""
        if [ -f "$name/result" ]; then IFS=$'\t' read -r kind seconds message <"$name/result"; fi
        printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t' "${model##*/}" "$length" "$precision" "$gpus" "$kind" "$seconds" "$message"
        if [ "$kind" = done ]; then printf '%s\t%s\n' "$(head -n 1 "$name/log.jsonl")" "$(tail -n 1 "$name/log.jsonl")"; else printf '\t\n'; fi
    done <runs.txt
}

collect | LC_ALL=C awk -F '\t' '
# The value of a key that stands once in a line of log.jsonl, as written there; "" if it is missing or null.
function value(line, key,   v) {
    if (!match(line, "\"" key "\": (\"[^\"]*\"|[^,}]*)")) return ""
    v = substr(line, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
    gsub(/"/, "", v)
    return v == "null" ? "" : v
}
function show(format, v) { return v == "" ? "n/a" : sprintf(format, v) }
function ratio(a, b) { return a == "" || b == "" || b + 0 == 0 ? "" : a / b }
function repeat(c, n,   s) { while (n-- > 0) s = s c; return s }
function csv(v) { if (v ~ /[",]/) { gsub(/"/, "\"\"", v); return "\"" v "\"" } return v }

{
    n = NR
    model[n] = $1; T[n] = $2; precision[n] = $3; gpus[n] = $4; kind[n] = $5; seconds[n] = $6; message[n] = $7
    at[$1, $2, $3, $4] = n
    if ($5 != "done") next
    speed[n] = value($9, "tokens_per_second_per_gpu"); total[n] = value($9, "tokens_per_second"); ms[n] = value($9, "median_ms")
    tflops[n] = value($9, "tflops_per_gpu"); mfu[n] = value($9, "mfu"); sol[n] = value($9, "sol"); memory[n] = value($9, "memory_bytes")
    loss[n] = value($9, "last_loss"); first[n] = value($9, "first_loss"); skipped[n] = value($9, "skipped"); steps[n] = value($9, "steps")
    parameters[n] = value($8, "parameters"); device[n] = value($8, "device")
    setup = value($8, "program") " " value($8, "version") ", " device[n] ", " value($8, "versions")
    if (!(setup in seen)) { seen[setup] = 1; setups = setups setup "\n" }
}

# What a run is against others of its row: FP8 against BF16 on the same GPUs, and any number of GPUs against one.
function compare(i,   b, one) {
    b = message[i] ~ /^nothing ran in FP8/ ? 0 : at[model[i], T[i], "bf16", gpus[i]]; one = at[model[i], T[i], precision[i], 1]
    speedup[i] = precision[i] ~ /^fp8/ && b ? ratio(speed[i], speed[b]) : ""
    loss_ratio[i] = precision[i] ~ /^fp8/ && b ? ratio(loss[i], loss[b]) : ""
    scaling[i] = one ? ratio(speed[i], speed[one]) : ""
}

# What the table says of a run in words; table.csv has messages whole.
function note(i,   m) {
    m = length(message[i]) > 160 ? substr(message[i], 1, 157) "..." : message[i]
    if (kind[i] != "done") return (kind[i] == "memory" ? "out of memory" : kind[i]) (m == "" ? "" : ": " m)
    return (skipped[i] + 0 > 0 ? skipped[i] " steps skipped (non-finite gradient); " : "") m
}

# Cells of line i of the table, as text; line 0 is the head.
function fill(i, line,   c) {
    columns = split(line, c, "\t")
    for (j = 1; j <= columns; j++) {
        cell[i, j] = c[j]
        if (j < columns && length(c[j]) > width[j]) width[j] = length(c[j])
    }
}

function fill_run(i) {
    if (kind[i] != "done") { fill(i, model[i] "\t" T[i] "\t" gpus[i] "\t" precision[i] repeat("\t", 11) note(i)); return }
    fill(i, model[i] "\t" T[i] "\t" gpus[i] "\t" precision[i] "\t" show("%.0f", speed[i]) "\t" show("%.0f", total[i]) "\t" show("%.3f", ratio(1000, ms[i])) "\t" \
        show(tflops[i] + 0 < 1 ? "%.4f" : "%.1f", tflops[i]) "\t" show("%.1f%%", mfu[i] == "" ? "" : 100 * mfu[i]) "\t" show(memory[i] + 0 < 2 ^ 30 ? "%.3f" : "%.1f", ratio(memory[i], 2 ^ 30)) "\t" \
        show("%.4f", loss[i]) "\t" (precision[i] ~ /^fp8/ ? show("%.2fx", speedup[i]) : "") "\t" \
        (precision[i] ~ /^fp8/ ? show("%+.2f%%", loss_ratio[i] == "" ? "" : 100 * (loss_ratio[i] - 1)) : "") "\t" show("%.1f%%", scaling[i] == "" ? "" : 100 * scaling[i]) "\t" note(i))
}

function csv_run(i) {
    return csv(model[i]) "," T[i] "," gpus[i] "," precision[i] "," kind[i] "," steps[i] "," speed[i] "," total[i] "," ratio(1000, ms[i]) "," ms[i] "," tflops[i] "," mfu[i] "," sol[i] "," \
        memory[i] "," first[i] "," loss[i] "," speedup[i] "," loss_ratio[i] "," scaling[i] "," skipped[i] "," parameters[i] "," csv(device[i]) "," seconds[i] "," csv(message[i])
}

END {
    CONVFMT = "%.17g"
    fill(0, "model\tT\tGPUs\tprecision\ttok/s/GPU\ttok/s\tsteps/s\tTFLOP/s/GPU\tMFU\tGiB/GPU\tloss\tFP8/BF16\tloss diff\tscaling\tnote")
    for (i = 1; i <= n; i++) { compare(i); fill_run(i); finished += (kind[i] == "done") }
    about = "Speeds: median step after warm-up. MFU: of the dense BF16 peak. GiB/GPU: peak. loss: mean of the last 20 steps (all, if fewer). FP8/BF16: tok/s/GPU over that of\nBF16 with the same model, T and GPUs; loss diff: its loss against that. scaling: tok/s/GPU over that of one GPU with the same model, T and precision.\n"

    print "model,sequence_length,gpus,precision,result,steps,tokens_per_second_per_gpu,tokens_per_second,steps_per_second,median_ms,tflops_per_gpu,mfu,sol,memory_bytes,first_loss,last_loss,fp8_over_bf16_speed,fp8_over_bf16_loss,scaling_efficiency,skipped_steps,parameters,device,seconds,message" >"table.csv"
    printf "%s", setups >"table.txt"
    printf "%s\n", setups >"table.md"
    for (i = 0; i <= n; i++) {
        if (i > 0) print csv_run(i) >"table.csv"
        text = sprintf("%-*s", width[1], cell[i, 1]); marked = "| " cell[i, 1] " |"
        for (j = 2; j < columns; j++) text = text sprintf("  %*s", width[j], cell[i, j])
        for (j = 2; j <= columns; j++) { c = cell[i, j]; gsub(/\|/, "\\|", c); marked = marked " " c " |" }
        text = text "  " cell[i, columns]
        sub(/ +$/, "", text)
        print text >"table.txt"
        print marked >"table.md"
        if (i == 0) print "|---|" repeat("---:|", columns - 2) "---|" >"table.md"
    }
    printf "\n%s%d of %d runs finished\n", about, finished, n >"table.txt"
    printf "\n%s%d of %d runs finished\n", about, finished, n >"table.md"
}' && cat table.txt
