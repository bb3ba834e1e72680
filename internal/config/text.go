package config

import (
	"reflect"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

// textKeys are the keys whose value is text. YAML would read some of it as something else: the
// network "null" as nothing and the mode 0660 as the number 432.
var textKeys = textFields(reflect.TypeFor[Guest](), reflect.TypeFor[Process]())

func textFields(types ...reflect.Type) map[string]bool {
	keys := map[string]bool{}
	for _, t := range types {
		for field := range t.Fields() {
			if field.Type.Kind() == reflect.String {
				name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
				keys[name] = true
			}
		}
	}
	return keys
}

// keepText replaces plain scalars by the text as written wherever text is wanted.
type keepText struct{}

// Visit implements ast.Visitor.
func (keepText) Visit(node ast.Node) ast.Visitor {
	pair, ok := node.(*ast.MappingValueNode)
	if !ok || pair.Key == nil || pair.Key.GetToken() == nil || !textKeys[pair.Key.GetToken().Value] {
		return keepText{}
	}
	switch pair.Value.(type) {
	case *ast.NullNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		if t := pair.Value.GetToken(); t != nil && t.Type != token.ImplicitNullType {
			pair.Value = ast.String(t)
		}
	}
	return keepText{}
}
