"""Checks scripts/mpijob.yaml against the schema of MPIJob in Kubeflow's MPI Operator.

Takes the schema from the file that the environment variable MPIJOB_CRD names, or downloads it once to build/. First
checks what the schema does not say. If the schema cannot be had, the rest is skipped; without PyYAML, everything is.
Ends with "N passed, N failed".
"""
import copy
import os
import pathlib
import urllib.error
import urllib.request

from lib.counted import ROOT, check, finish

URL = "https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.8.0/manifests/base/kubeflow.org_mpijobs.yaml"
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def skip(reason):
    print(f"skipped: checks of scripts/mpijob.yaml: {reason}")
    finish()


def read_schema():
    """Returns the YAML file with the schema of MPIJob as text. Downloads it if there is no copy; if that fails, skips
    the rest of the test.
    """
    path = pathlib.Path(os.environ.get("MPIJOB_CRD") or ROOT / "build" / "kubeflow.org_mpijobs.yaml")
    if not path.exists():
        try:
            with urllib.request.urlopen(URL, timeout=20) as answer:
                text = answer.read()
        except (urllib.error.URLError, OSError) as error:
            skip(f"cannot download {URL}: {error}; MPIJOB_CRD=FILE names a copy")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
    return path.read_text()


def wrong_type(value, schema):
    kinds = TYPES.get(schema.get("type"), object)
    if schema.get("x-kubernetes-int-or-string"):
        kinds = (int, str)
    return not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in (bool, object))


def faults(value, schema, where=""):
    """Lists what is wrong with a value by its OpenAPI schema: types, enums, missing fields, fields that the schema
    lacks.
    """
    if wrong_type(value, schema):
        return [f"{where}: {value!r} is no {schema.get('type', 'int or string')}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += faults(item, schema["items"], f"{where}[{index}]")
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        fields = schema.get("properties", {})
        found += [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            rule = fields.get(name, schema.get("additionalProperties"))
            found += faults(item, rule, f"{where}.{name}") if rule else [f"{where}: there is no field {name}"]
    return found


def changed(job, path, value):
    """Returns a copy of the job with one field set, or removed if value is None."""
    job = copy.deepcopy(job)
    at = job
    for name in path[:-1]:
        at = at[name]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return job


def check_schema(job, schema):
    found = faults(job, schema)
    check(not found, f"mpijob.yaml fits the schema: {found}")
    pod = ["spec", "mpiReplicaSpecs", "Worker", "template", "spec"]
    container = pod + ["containers", 0]
    for path, value in [
        (["spec", "slotsPerWorker"], "eight"),
        (["spec", "slotsPerWorkers"], 8),
        (["spec", "mpiImplementation"], "OpenMPI5"),
        (["spec", "mpiReplicaSpecs"], None),
        (["spec", "runPolicy", "cleanPodPolicy"], True),
        (pod + ["containers"], None),
        (container + ["name"], None),
        (container + ["args"], "sshd"),
        (container + ["resources", "limits", "nvidia.com/gpu"], [8]),
        (container + ["volumeMounts", 0, "mount"], "/data"),
    ]:
        check(faults(changed(job, path, value), schema), f"the schema refuses {path} = {value!r} (None: removed)")


def check_roles(job):
    """Checks what the operator and the trainer need and the schema does not say."""
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker"))
    gpus = worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    ranks = spec.get("slotsPerWorker")
    check(gpus == ranks, f"a worker has a rank for each GPU: {gpus} GPUs, {ranks} ranks")
    check("nvidia.com/gpu" not in launcher["containers"][0]["resources"]["limits"], "the launcher asks for no GPU")
    check(spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1, "there is one launcher")
    images = {launcher["containers"][0]["image"], worker["containers"][0]["image"]}
    check(len(images) == 1, f"launcher and worker have one image: {images}")
    volumes = {volume["name"] for volume in worker["volumes"]}
    mounts = {mount["name"] for mount in worker["containers"][0]["volumeMounts"]}
    check(volumes == mounts, f"the worker mounts its volumes {volumes}: {mounts}")
    words = launcher["containers"][0]["args"]
    check("--resume" in words and any(word.startswith("--checkpoint-dir") for word in words),
          "the command has --resume and --checkpoint-dir, so the run can go on")
    check("openssh-server" in (ROOT / "Dockerfile").read_text(), "the Dockerfile names openssh-server")


def main():
    try:
        import yaml
    except ImportError:
        skip("no PyYAML (python3-yaml)")
    job = yaml.safe_load((ROOT / "scripts" / "mpijob.yaml").read_text())
    check_roles(job)
    versions = yaml.safe_load(read_schema())["spec"]["versions"]
    schemas = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == job["apiVersion"].split("/")[1]]
    check(len(schemas) == 1, f"the schema file has one schema of {job['apiVersion']}")
    check_schema(job, schemas[0])
    finish()


main()
