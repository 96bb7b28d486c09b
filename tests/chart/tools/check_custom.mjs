// Check custom resources against the models of their operators: JSON list in, problems out.
// It runs where the packages are (.tools/chart), to which install.py copies it.
import { readFileSync } from "node:fs";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import { ServiceMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor";

const models = { HTTPRoute, ScaledObject, ServiceMonitor };
const problems = [];
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const Model = models[resource.kind];
  if (Model === undefined) {
    problems.push(`${resource.kind}: no model to check it against`);
    continue;
  }
  try {
    const model = new Model(resource);
    if (model.apiVersion !== resource.apiVersion) throw new Error(`apiVersion ${resource.apiVersion}`);
    model.validate();
  } catch (error) {
    problems.push(`${resource.kind}/${resource.metadata?.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(problems));
